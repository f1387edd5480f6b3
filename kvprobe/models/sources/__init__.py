"""Ways to reach a model's files: one file each."""
