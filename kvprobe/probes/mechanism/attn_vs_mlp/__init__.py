"""Probe `attn_vs_mlp`: `probe.py` measures, `reading.py` turns rows into effects and a figure."""
