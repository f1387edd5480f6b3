"""Edit methods: what to do with a cached prompt when one of its fields changes."""
