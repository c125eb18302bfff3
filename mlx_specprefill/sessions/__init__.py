"""Conversations with a sparse prefix: reads dropped text later, behind the cached tokens."""
