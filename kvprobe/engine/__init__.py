"""Causal interventions on key-value caches: the algebra, forward passes, sweeps and readouts."""
