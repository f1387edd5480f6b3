"""Figures as data: a probe says in a short spec what its figure shows, and a few drawers draw any of them."""
