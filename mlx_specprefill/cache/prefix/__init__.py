"""Prefixes that are kept between requests: a tree of token blocks per model and label, in memory and on disk."""
