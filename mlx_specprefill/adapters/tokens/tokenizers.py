"""Loads one tokenizer for a target and a draft with the same tokens, since each takes two seconds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .turn_ends import end_with_turns

Made = tuple[TokenizerWrapper, dict[str, Any]]
"""A tokenizer, and what it adds to its model's configuration."""
Tokenizers = dict[str, Made]
"""The tokenizers of a pair, by a digest of what their tokens depend on."""


def make_once(known: Tokenizers | None, source: Iterable[object], make: Callable[[], Made]) -> Made:
    """Return a tokenizer, made now, or a known one with the same tokens. Its answers end with its template's turns.

    Args:
        known: those that are made already; the new one is added. None: no other model wants it.
        source: all that its tokens depend on; not looked at if nothing is known.
    """
    key = "" if known is None else _digest(source)
    if known is not None and key in known:
        return known[key]
    tokenizer, settings = make()
    end_with_turns(tokenizer, settings)
    if known is not None:
        known[key] = tokenizer, settings
    return tokenizer, settings


def _digest(source: Iterable[object]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in source:
        digest.update(f"{part!r}\0".encode())
    return digest.hexdigest()
