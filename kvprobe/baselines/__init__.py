"""Editing the weights instead of the cache: the baselines of section 5's comparison (protocol 5.8, critique ED10)."""
