"""Models under study: where they come from, how they are loaded, what they are built of."""
