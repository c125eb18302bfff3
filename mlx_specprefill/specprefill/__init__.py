"""Sparse prefill: scoring by the draft, selection of tokens, and the target's prefill of the kept ones.

Here: scoring by the draft, selection, forced tokens, plans, calibration of heads and shares. Not here: requests in
parallel, caches of earlier turns, anything that decodes. Read first: scorer.py, selector.py, sparse_prefill.py.
"""
