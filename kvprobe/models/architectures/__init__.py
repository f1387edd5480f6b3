"""One adapter for each attention form; see `base.ArchitectureAdapter`."""
