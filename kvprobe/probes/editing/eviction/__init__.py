"""Probe `eviction`: `probe.py` measures, `reading.py` turns rows into effects and a figure."""
