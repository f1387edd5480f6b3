"""What several probes share."""
