"""What reusing a precompiled cache does and costs: section 5 of the paper."""
