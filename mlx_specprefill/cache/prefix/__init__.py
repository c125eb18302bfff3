"""Exact prefixes, shared by requests with the same label: a tree of blocks, its records, and the disk tier.

Here: the tree of blocks, the records in it, the disk tier. Not here: sparse caches, which never answer a dense request.
Read first: tree.py, records.py, disk.py.
"""
