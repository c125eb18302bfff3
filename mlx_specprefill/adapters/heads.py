"""Which heads of a draft look from a question at its answer, as calibration found them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import LoadError

__all__ = ["DraftHeads", "Head", "read_heads"]

_FINDS = 0.5  # recall of the kind of item that it finds best, from which on a draft may choose


@dataclass(frozen=True, slots=True)
class Head:
    """One head: the number of its attention call in a forward, its place in there, and its weight."""

    call: int
    head: int
    weight: float


@dataclass(frozen=True, slots=True)
class DraftHeads:
    """What calibration found for one draft.

    Attributes:
        heads: the best ones, by descending gain.
        depth: layers of the draft that have to run for them, of `layers`.
        recall: share of the calibration items' gold tokens that they keep at 20 %, by kind of item.
    """

    heads: tuple[Head, ...]
    depth: int
    layers: int
    recall: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        heads = [[head.call, head.head, round(head.weight, 4)] for head in self.heads]
        recall = {kind: round(value, 4) for kind, value in self.recall.items()}
        return {"heads": heads, "depth": self.depth, "layers": self.layers, "recall": recall}

    @classmethod
    def from_dict(cls, values: Any) -> DraftHeads:
        """Raises ValueError: it is not what `to_dict` makes."""
        try:
            heads = tuple(Head(int(call), int(head), float(weight)) for call, head, weight in values["heads"])
            recall = {str(kind): float(value) for kind, value in values["recall"].items()}
            found = cls(heads, int(values["depth"]), int(values["layers"]), recall)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"no calibrated heads: {error!r}") from error
        sound = all(h.call >= 0 and h.head >= 0 and 0 < h.weight < math.inf for h in found.heads)
        if not found.heads or not sound or not 1 <= found.depth <= found.layers:
            raise ValueError("no calibrated heads: no head, or a number, weight or depth out of range")
        return found

    @property
    def refusal(self) -> str | None:
        """Why this draft must not choose what a target sees; None if it may."""
        if not self.recall or max(self.recall.values()) >= _FINDS:
            return None
        found = ", ".join(f"{kind} {share:.2f}" for kind, share in self.recall.items())
        return f"no head of the draft finds what a question asks for (share of it kept at 20 %: {found})"

    @property
    def by_call(self) -> dict[int, list[int]]:
        calls: dict[int, list[int]] = {}
        for head in self.heads:
            calls.setdefault(head.call, []).append(head.head)
        return calls


def read_heads(file: Path) -> DraftHeads:
    """Heads that were written as `DraftHeads.to_dict`.

    Raises:
        LoadError: the file can't be read, or holds something else.
    """
    try:
        return DraftHeads.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise LoadError(f"{file}: {error}") from error
