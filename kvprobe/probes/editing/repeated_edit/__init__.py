"""Probe `repeated_edit`: `probe.py` measures, `reading.py` turns rows into effects and a figure."""
