"""What several probes' readings share; no part of a cell's hash."""
