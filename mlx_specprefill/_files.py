"""Restores the limit on open files, which importing mlx-lm sets to 2048, and its hard limit to 4096.

That raises if the hard limit is lower, and lowers it if it is higher.
"""

from __future__ import annotations

import importlib
import resource

__all__ = ["preload"]

_WANTED = 2048  # open files: checkpoints have many shards, and the usual limit of macOS is 256


def preload() -> None:
    """Import mlx-lm, and raise the soft limit as mlx-lm would as far as the hard limit allows."""
    change = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        importlib.import_module("mlx_lm.utils")
    finally:
        resource.setrlimit = change
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        change(resource.RLIMIT_NOFILE, (wanted, hard))
