"""What follows a sparse turn of a conversation: extend, repair or restart its cache.

Here: the store of sparse caches, the choice of the way on, the insertion of chunks that are missing. Not here: dense
prefixes (`cache.prefix`) and the engine's queue. Read first: continuing.py, store.py, repair.py.
"""
