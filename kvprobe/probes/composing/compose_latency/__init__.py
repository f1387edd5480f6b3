"""Probe `compose_latency`: `probe.py` measures, `reading.py` turns rows into effects and a figure."""
