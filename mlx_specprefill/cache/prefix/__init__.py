"""Dense prefixes, exact and shared by requests of one label.

Here: the tree of blocks, the records in it, the disk tier. Not here: sparse caches, which never answer a dense request.
Read first: tree.py, records.py, disk.py.
"""
