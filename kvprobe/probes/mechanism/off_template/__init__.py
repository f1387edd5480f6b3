"""Probe `off_template`: `probe.py` measures, `reading.py` turns rows into effects and a figure."""
