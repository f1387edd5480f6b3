"""Where a field acts from and what carries it: section 3 of the paper."""
