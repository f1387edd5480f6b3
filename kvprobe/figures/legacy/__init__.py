"""Pieces of figures that are no specs yet; goes with the last of them."""
