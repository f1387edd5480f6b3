"""Prompts as named segments, the scenario library, and pairs that differ in one field."""
