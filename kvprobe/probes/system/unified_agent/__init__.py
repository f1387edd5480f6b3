"""Probe `unified_agent`: `probe.py` measures, `reading.py` turns rows into effects and a figure."""
