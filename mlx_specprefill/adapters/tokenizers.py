"""A draft with the target's tokens takes the target's tokenizer, whatever its template: one takes two seconds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .turn_ends import end_with_turns

Made = tuple[TokenizerWrapper, dict[str, Any]]
"""A tokenizer, and what it adds to its model's configuration."""
Tokenizers = dict[str, Made]
"""Those of a pair, by a digest of what their tokens depend on."""


def make_once(known: Tokenizers, source: Iterable[object], make: Callable[[], Made]) -> Made:
    """Return a tokenizer, made now, or a known one with the same tokens. Its answers end with its template's turns.

    Args:
        source: all that its tokens depend on.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in source:
        digest.update(f"{part!r}\0".encode())
    key = digest.hexdigest()
    if key not in known:
        tokenizer, settings = make()
        end_with_turns(tokenizer, settings)
        known[key] = tokenizer, settings
    return known[key]
