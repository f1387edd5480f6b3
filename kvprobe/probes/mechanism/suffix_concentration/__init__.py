"""Probe `suffix_concentration`: `probe.py` measures, `reading.py` turns rows into effects and a figure."""
