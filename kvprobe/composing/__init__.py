"""Composing prompts from parts whose keys and values were computed once, elsewhere (paper section 5)."""
