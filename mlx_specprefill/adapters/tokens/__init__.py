"""Tokenizers of targets and drafts, and tokens of one found in the text of the other."""
