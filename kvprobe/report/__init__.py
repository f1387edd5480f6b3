"""Results as people read them: figures, tables, the comparison with the paper's numbers."""
