"""Editing and composing together: section 6 of the paper."""
