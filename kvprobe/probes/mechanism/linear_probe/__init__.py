"""Probe `linear_probe`: `probe.py` measures, `reading.py` turns rows into effects and a figure."""
