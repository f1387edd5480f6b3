"""Mechanistic interpretability of KV caches: probe, edit and compose what a model wrote at prefill."""
