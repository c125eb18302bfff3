"""Speculative decoding: several tokens per forward of the target, with the target's distribution."""
