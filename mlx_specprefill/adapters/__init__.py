"""Everything that depends on a model's code: architectures, wrappers of mlx and mlx-lm, GGUF files, trained heads.

Here: everything that depends on how a model is written. Not here: requests. Read first: registry.py, rope.py,
capture.py.
"""
