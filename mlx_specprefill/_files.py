"""The limit on open files, which mlx-lm sets when it is imported: to 2048, and the hard limit to 4096.

That fails where the hard limit is lower, with a traceback in place of a server, and takes away from where it is higher.
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
