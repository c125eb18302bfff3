"""What is kept for later requests: an entry in a listing, and the result of a look-up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..request import SHARED, CacheLabel

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
    """`cache` stands for exactly the first `length` tokens and is the caller's to change."""

    length: int
    cache: list[Any]
