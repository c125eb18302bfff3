"""KV caches in which slot and position differ, alone and in a batch, and caches kept between requests.

Here: positioned and batched caches, the byte budget; `prefix` holds dense prefixes. Not here: models. Read first:
positioned.py, batched.py, prefix/tree.py.
"""
