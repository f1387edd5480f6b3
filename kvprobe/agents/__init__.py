"""Agents: one conversation, a cache that lives through its turns, and a decision in each (paper section 6)."""
