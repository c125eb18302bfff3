"""The truth about staged prefill: a dense run in which dropped tokens are masked in the layers from one on only.

As `tests/support/oracle.py`, with mlx-lm's own caches, masks and rotation, and without the code under test. The layers
below see everything while they read the prompt; in the others a dropped token is seen by itself alone, and recurrent
modules skip it. The tokens of an answer see no dropped token in any layer.

A later turn reads an earlier answer again with its first layers. The others go on from what they had of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import RotatingKVCache

from mlx_specprefill.adapters.depth import layers_of, smallest_depth
from mlx_specprefill.adapters.staged import StagedModel
from mlx_specprefill.cache.positioned import make_positioned_cache, place
from mlx_specprefill.errors import SparseUnsupportedError
from tests.support.oracle import (
    CHUNKS,
    EXACT,
    Case,
    Logits,
    _MaskedDense,
    build,
    make_case,
    relative_error,
    variants,
    vocabulary,
)
from tests.support.refusals import STAGED_REFUSALS


def masked_from(
    model: nn.Module, case: Case, first: int, before: Case | None = None, kv_bits: int | None = None
) -> Logits:
    """Logits of the last prompt token and of every continuation token, (1 + T, V); layers below `first` see all.

    Args:
        before: the turn before; its prompt and continuation begin the prompt.
        kv_bits: as in `masked_dense`.
    """
    answered = None
    if before is not None:
        answered = _MaskedFrom(model, before, first)
        answered.run()
    return _MaskedFrom(model, case, first, answered, kv_bits).run()


class _MaskedFrom(_MaskedDense):
    """Attributes:
    keys, values: of the continuation in each layer from `first` on; `inputs`: to each of their recurrent modules.
    """

    def __init__(
        self,
        model: nn.Module,
        case: Case,
        first: int,
        before: _MaskedFrom | None = None,
        kv_bits: int | None = None,
    ) -> None:
        super().__init__(model, case, kv_bits)
        self.before = before
        self.keys: dict[int, mx.array] = {}
        self.values: dict[int, mx.array] = {}
        self.inputs: dict[int, list[mx.array]] = {}
        self.first, self.layer = first, 0
        self.ring_layers = {n for n, part in enumerate(self.caches) if isinstance(part, RotatingKVCache)}
        self.some = self.kept
        self.fed = self.turns
        self.recalled = self.recall
        # What masks made from caches hide: nothing.
        self.kept, self.turns = np.ones_like(self.some), np.zeros_like(self.fed)
        self.recall = np.zeros_like(self.fed)

    def run(self) -> Logits:
        with self._following_layers():
            return super().run()

    @contextmanager
    def _following_layers(self) -> Iterator[None]:
        """`layer` is the one that is running."""
        numbers = {id(layer): number for number, layer in enumerate(self.model.layers)}
        calls = {kind: kind.__call__ for kind in {type(layer) for layer in self.model.layers}}

        def entering(call: Callable[..., Any]) -> Callable[..., Any]:
            def enter(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                self.layer = numbers.get(id(module), self.layer)
                return call(module, *args, **kwargs)

            return enter

        for kind, call in calls.items():
            kind.__call__ = entering(call)
        try:
            yield
        finally:
            for kind, call in calls.items():
                kind.__call__ = call

    @property
    def hides(self) -> bool:
        return self.layer >= self.first or self.coming[0] >= self.case.prompt.size

    def _attend(self, q: mx.array, k: mx.array, v: mx.array, **kwargs: Any) -> mx.array:
        if not self.hides:
            return super()._attend(q, k, v, **kwargs)
        if self.layer >= self.first and (keys := self._keys_of(k.shape[-2])) is not None:
            k, v = self._as_before(k, keys, "keys"), self._as_before(v, keys, "values")
        with self._hiding():
            return super()._attend(q, k, v, **kwargs)

    def _as_before(self, array: mx.array, keys: np.ndarray, name: str) -> mx.array:
        """Note what the continuation has; put in what the answer of the turn before had."""
        size = self.case.prompt.size
        if self.coming[0] >= size:
            mine = getattr(self, name)
            known = [mine[self.layer]] if self.layer in mine else []
            mine[self.layer] = mx.concatenate([*known, array[..., -1:, :]], axis=2)
        if self.before is not None:
            start, answer = self.before.case.prompt.size, getattr(self.before, name)[self.layer]
            there = np.flatnonzero((keys >= start) & (keys < start + answer.shape[2]))
            array = mx.array(array)
            array[..., mx.array(there), :] = answer[..., mx.array(keys[there] - start), :]
        return array

    @contextmanager
    def _hiding(self) -> Iterator[None]:
        everything = self.kept, self.turns, self.recall
        self.kept, self.turns, self.recall = self.some, self.fed, self.recalled
        try:
            yield
        finally:
            self.kept, self.turns, self.recall = everything

    def _visible(self, keys: Any, window: int | None) -> mx.array:
        visible = super()._visible(keys, window)
        return visible & self._of_one_recall(keys) if self.layer in self.ring_layers else visible

    @contextmanager
    def _stock_primitives(self) -> Iterator[None]:
        """Hand-written attention hides them in its softmax."""
        installed = mx.softmax

        def normalise(logits: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            keys = self._keys_of(logits.shape[-1]) if logits.ndim >= 4 and self.hides else None
            if keys is not None and logits.shape[-2] == self.coming.size:
                with self._hiding():
                    logits = mx.where(self._visible(keys, None), logits, -mx.inf)
            return installed(logits, *args, **kwargs)

        with super()._stock_primitives():
            mx.softmax = normalise
            try:
                yield
            finally:
                mx.softmax = installed

    def _skipping(self, call: Callable[..., mx.array]) -> Callable[..., mx.array]:
        skip = super()._skipping(call)

        def run(module: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
            if self.layer < self.first:
                return call(module, *args, **kwargs)
            if args:
                args = self._inputs_as_before(module, args[0]), *args[1:]
            return skip(module, *args, **kwargs)

        return run

    def _inputs_as_before(self, module: nn.Module, inputs: mx.array) -> mx.array:
        if self.coming[0] >= self.case.prompt.size:
            self.inputs.setdefault(id(module), []).append(inputs)
        elif self.before is not None:
            start, answer = self.before.case.prompt.size, mx.concatenate(self.before.inputs[id(module)], axis=1)
            rest = inputs[:, start + answer.shape[1] :]
            inputs = mx.concatenate([inputs[:, :start], answer, rest], axis=1)
        return inputs


# --- the library's ---------------------------------------------------------------------------------------------------


def staged(model: nn.Module, case: Case, first: int, chunks: tuple[int, ...] = CHUNKS) -> Logits:
    """The first layers over the whole prompt, the others over the kept tokens, then all of them token by token."""
    split, caches = StagedModel(model, first), make_positioned_cache(model)
    lower, upper = split.split(caches)
    hidden = []
    for start, end in _parts(case.prompt.size, chunks):
        hidden.append(split.lower(mx.array(case.prompt[start:end])[None], cache=lower))
        mx.eval(hidden[-1], [part.state for part in lower])
    states = mx.concatenate(hidden, axis=1)[:, mx.array(case.kept)]
    for start, end in _parts(case.kept.size, chunks):
        place(upper, case.kept[start:end])
        tokens = mx.array(case.prompt[case.kept[start:end]])[None]
        logits = split.upper(tokens, states[:, start:end], upper)
        mx.eval(logits, [part.state for part in upper])
    rows = [logits[0, -1]]
    split.unite(caches, case.kept)
    for token in case.continuation.tolist():
        rows.append(model(mx.array([[token]]), cache=caches)[0, -1])
        mx.eval(rows[-1], [part.state for part in caches])
    return np.stack([np.array(row.astype(mx.float32)) for row in rows])


def _parts(size: int, chunks: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Ends of forwards; the last token alone."""
    start = turn = 0
    while start < size:
        count = 1 if start == size - 1 else min(chunks[turn % len(chunks)], size - 1 - start)
        yield start, start + count
        start, turn = start + count, turn + 1


def splits(model: nn.Module) -> list[int]:
    """Numbers of first layers among which one sees the whole prompt; of deep models the first and the last two."""
    counts = list(range(smallest_depth(model), len(layers_of(model))))
    return counts if len(counts) <= 4 else [*counts[:2], *counts[-2:]]


def deep_enough(name: str) -> nn.Module:
    """The tiny model, with twice as many layers where only the last one sees the whole prompt."""
    model = build(name)
    return model if splits(model) else build(name, times=2)


@cache
def staged_errors(name: str) -> dict[int, float | str]:
    """By number of first layers: the error relative to the truth, or why that split is refused."""
    model = deep_enough(name)
    case = make_case(vocabulary(model))
    return {first: _error(model, case, first) for first in splits(model)}


def _error(model: nn.Module, case: Case, first: int) -> float | str:
    try:
        got = staged(model, case, first)
    except SparseUnsupportedError as error:
        return str(error)
    return relative_error(got, masked_from(model, case, first))


def can_be_staged(architecture: str) -> bool:
    """Return what `verified.json` must say: True if some split is exact and none is wrong."""
    found = [error for name in variants(architecture) for error in staged_errors(name).values()]
    errors = [error for error in found if isinstance(error, float)]
    return bool(errors) and max(errors) < EXACT


def with_staged(architecture: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row of `verified.json` with what it says about staged prefill."""
    refusals = row["refusals"]
    reason = refusals.get("sparse") or refusals.get("depth") or STAGED_REFUSALS.get(architecture)
    if reason is None and not can_be_staged(architecture):
        reason = "its layers in two parts differ from the model"
    return row | {"refusals": refusals | ({} if reason is None else {"staged": reason})}
