"""Training of retrieval heads: a small attention layer on top of a target's first layers, as a draft."""
