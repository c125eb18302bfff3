"""Entries of the cache, as listed and as found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx

from ..request import SHARED, CacheLabel, TokenIds

__all__ = ["CacheEntry", "CacheHit", "CacheKind"]

CacheKind = Literal["target", "draft", "session"]


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A cached prefix without its content.

    Attributes:
        id: identifies it in `Engine.drop_cached`; a digest that reveals no token.
        kind: a dense prefix of the target or of the draft, or a sparse session.
        tokens: from the start of the prompt, dropped ones included.
        nbytes: memory that dropping it frees, without parts shared with other prefixes.
        hits: requests that used it.
        last_use: seconds since the epoch; 0 if it was not used since the start.
        on_disk: it survives a restart.
        label: under which it is found.
    """

    id: str
    kind: CacheKind
    tokens: int
    nbytes: int
    hits: int
    last_use: float
    on_disk: bool = False
    label: CacheLabel = SHARED


@dataclass(frozen=True, slots=True)
class CacheHit:
    """A found prefix. `cache` covers exactly the first `length` tokens and belongs to the caller.

    Attributes:
        held: prompt indices in a sparse cache, int32, in the order of feeding; None: it holds all.
        hidden: parts of a staged one, each (index of the first token, hidden states (1, L, D)).
    """

    length: int
    cache: list[Any]
    held: TokenIds | None = None
    hidden: list[tuple[int, mx.array]] = field(default_factory=list)
