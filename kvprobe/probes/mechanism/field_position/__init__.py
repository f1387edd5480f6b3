"""Probe `field_position`: `probe.py` measures, `reading.py` turns rows into effects and a figure."""
