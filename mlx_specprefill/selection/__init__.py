"""Sparse prefill: scoring by the draft, selection of tokens, and the target's prefill of the kept ones."""
