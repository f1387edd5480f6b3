"""Probe `image_splice`: `probe.py` measures, `reading.py` turns rows into effects and a figure."""
