"""Holds the attention heads that calibration found for a draft, reads them from files, and knows those that ship.

A model is known by a fingerprint of its norms.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..arrays import Floats, Spans
from ..cache.positioned import leaves
from ..errors import LoadError

SHIPPED_HEADS = Path(__file__).with_name("shipped_heads.json")
"""Heads by their model's fingerprint, measured by `scripts/calibrate_drafts.py`."""

_FINDS = 0.5  # recall in the draft's best kind of item from which on a draft may choose


@dataclass(frozen=True, slots=True)
class Head:
    """One head: the number of its attention call in a forward, its index in that call, and its weight."""

    call: int
    head: int
    weight: float


@dataclass(frozen=True, slots=True)
class LineProbe:
    """A linear function of a draft's cached values that says how much a line asks, beside others of its prompt.

    The values are a linear function of the states that a layer reads, and no position is in them. So nothing is stored
    with a cached prefix, and none of the draft's forwards changes.

    Attributes:
        caches: numbers of the caches whose values are read, among those that hold the whole prompt.
        weights: of a line's mean, and of its last token, each of all values of these caches; float16.
    """

    caches: tuple[int, ...]
    weights: bytes

    def scores(self, cache: Sequence[Any], lines: Spans) -> Floats:
        """Return how much each line asks, float32 (N,).

        Args:
            cache: the draft's, which holds the prompt.
            lines: [start, end) of each, (N, 2).
        """
        values = [array for number, array in enumerate(whole_values(cache)) if number in self.caches]
        weights, at, parts = np.frombuffer(self.weights, np.float16).reshape(2, -1), 0, list[mx.array]()
        for array in values:
            heads, _, size = array.shape
            own = mx.array(weights[:, at : at + heads * size].reshape(2, heads, size)).astype(array.dtype)
            parts.append((array @ own.transpose(1, 2, 0)).sum(axis=0))
            at += heads * size
        mean, last = np.array(sum(parts[1:], parts[0]).astype(mx.float32), dtype=np.float64).T
        total = np.append(0, np.cumsum(mean))
        start, end = lines.T
        return np.asarray((total[end] - total[start]) / (end - start) + last[end - 1], dtype=np.float32)

    def fits(self, draft: nn.Module) -> bool:
        """Return whether a draft's caches have as many values as the probe has weights. Computes nothing."""
        cache = make_prompt_cache(draft)
        draft(mx.zeros((1, 2), dtype=mx.int32), cache=cache)
        sizes = [values.shape[0] * values.shape[2] for values in whole_values(cache)]
        return max(self.caches) < len(sizes) and len(self.weights) == 4 * sum(sizes[number] for number in self.caches)


def whole_values(cache: Sequence[Any]) -> Iterator[mx.array]:
    """Yield the values (H, S, D) of each cache that holds the whole prompt."""
    for part in leaves(cache):
        if type(part) is KVCache and not part.empty():
            yield part.values[0, :, : part.offset]


@dataclass(frozen=True, slots=True)
class DraftHeads:
    """The heads that calibration found for one draft.

    Attributes:
        heads: the best ones, by descending gain.
        depth: layers of the draft that have to run for them, of `layers`.
        recall: share of the calibration items' gold tokens that they keep at 20 %, by kind of item.
        probe: says which lines ask; None: nothing does.
    """

    heads: tuple[Head, ...]
    depth: int
    layers: int
    recall: Mapping[str, float]
    probe: LineProbe | None = None

    def to_dict(self) -> dict[str, Any]:
        heads = [[head.call, head.head, round(head.weight, 4)] for head in self.heads]
        recall = {kind: round(value, 4) for kind, value in self.recall.items()}
        values = {"heads": heads, "depth": self.depth, "layers": self.layers, "recall": recall}
        if self.probe is None:
            return values | {"probe": None}  # none can be fitted
        weights = base64.b64encode(self.probe.weights).decode()
        return values | {"probe": {"caches": list(self.probe.caches), "weights": weights}}

    @classmethod
    def from_dict(cls, values: Any) -> DraftHeads:
        """Return the heads that `to_dict` wrote.

        Raises:
            ValueError: the values have another form.
        """
        try:
            heads = tuple(Head(int(call), int(head), float(weight)) for call, head, weight in values["heads"])
            recall = {str(kind): float(value) for kind, value in values["recall"].items()}
            probe = None if values.get("probe") is None else _probe_of(values["probe"])
            draft_heads = cls(heads, int(values["depth"]), int(values["layers"]), recall, probe)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"no calibrated heads: {error!r}") from error
        sound = all(h.call >= 0 and h.head >= 0 and 0 < h.weight < math.inf for h in draft_heads.heads)
        if not draft_heads.heads or not sound or not 1 <= draft_heads.depth <= draft_heads.layers:
            raise ValueError("no calibrated heads: no head, or a number, weight or depth out of range")
        return draft_heads

    @property
    def refusal(self) -> str | None:
        """Return why this draft must not choose the target's tokens; None if it may."""
        if not self.recall or max(self.recall.values()) >= _FINDS:
            return None
        recall = ", ".join(f"{kind} {share:.2f}" for kind, share in self.recall.items())
        return f"no head of the draft looks from a question at its answer (share of it kept at 20 %: {recall})"

    @property
    def by_call(self) -> dict[int, list[int]]:
        calls: dict[int, list[int]] = {}
        for head in self.heads:
            calls.setdefault(head.call, []).append(head.head)
        return calls


def _probe_of(values: Any) -> LineProbe:
    probe = LineProbe(tuple(map(int, values["caches"])), base64.b64decode(values["weights"], validate=True))
    if not probe.caches or not np.isfinite(np.frombuffer(probe.weights, np.float16)).all():
        raise ValueError("a probe without caches, or with weights that are no numbers")
    return probe


def read_heads(file: Path) -> DraftHeads:
    """Read heads written as `DraftHeads.to_dict`.

    Raises:
        LoadError: the file can't be read, or holds something else.
    """
    try:
        return DraftHeads.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise LoadError(f"{file}: {error}") from error


def shipped_heads(model: nn.Module) -> DraftHeads | None:
    """Return the calibrated heads of a whole model that come with the library, if there are some."""
    stored = json.loads(SHIPPED_HEADS.read_text(encoding="utf-8")).get(fingerprint(model))
    return None if stored is None else DraftHeads.from_dict(stored)


def fingerprint(model: nn.Module) -> str:
    """Return the fingerprint of a whole model's weights as hexadecimal text: the same for every quantisation and dtype.

    It covers the weights of all norms, which no quantisation changes, rounded to bfloat16.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, array in sorted(tree_flatten(model.parameters())):
        if name.endswith("norm.weight"):
            digest.update(name.encode())
            digest.update(np.array(array.astype(mx.bfloat16).view(mx.uint16)).tobytes())
    return digest.hexdigest()
