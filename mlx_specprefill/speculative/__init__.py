"""Speculative decoding: several tokens per forward of the target, with the target's distribution.

Here: proposers, verification, rollback, the caches of proposers. Not here: which request is drafted
(`engine.speculation`). Read first: row.py, verification.py, proposers.py.
"""
