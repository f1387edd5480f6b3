"""Which cache entries a budget leaves: methods by name, and eviction as an intervention on a decision."""
