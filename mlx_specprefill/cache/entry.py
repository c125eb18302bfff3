"""What is kept for later requests: an entry in a listing, and the result of a look-up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx

from ..request import SHARED, CacheLabel, TokenIds

__all__ = ["CacheEntry", "CacheHit", "CacheKind"]

CacheKind = Literal["target", "draft", "session"]


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """Something that is kept for later requests. Says nothing of what it holds.

    Attributes:
        id: names it in `Engine.drop_cached`; a digest, from which no token can be read.
        kind: a dense prefix of the target or of the draft, or a sparse session.
        tokens: from the start of the prompt; of a session the dropped ones too.
        nbytes: memory that dropping it frees; what prefixes share is not counted.
        hits: requests that used it.
        last_use: seconds since the epoch; 0 when it was not used since the start.
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
    """`cache` stands for exactly the first `length` tokens and is the caller's to change.

    Attributes:
        held: of a sparse one, the prompt indices that it holds in the order of feeding, int32; None: it holds all.
        hidden: of a staged one, (index of the first token, hidden states (1, L, D)) in parts.
    """

    length: int
    cache: list[Any]
    held: TokenIds | None = None
    hidden: list[tuple[int, mx.array]] = field(default_factory=list)
