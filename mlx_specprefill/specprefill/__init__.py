"""SpecPrefill itself: from a prompt to the kept tokens, and the target's prefill of those.

Here: scoring by the draft, selection, forced tokens, plans, calibration of heads and shares. Not here: requests in
parallel, caches of earlier turns, anything that decodes. Read first: scorer.py, selector.py, sparse_prefill.py.
"""
