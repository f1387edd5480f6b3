"""Probes: each asks one question of a model by intervening on its key-value cache."""
