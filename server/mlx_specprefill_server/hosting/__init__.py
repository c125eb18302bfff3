"""Which models are in memory: the ones a server knows, and how they come and go."""
