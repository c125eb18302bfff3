"""Getting models: what a hub has, what this machine has, and what they need."""
