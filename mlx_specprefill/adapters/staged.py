"""A model in two parts: its first layers read the whole prompt, the others only the kept tokens.

The counterpart of `depth`: a shallow copy of the modules around the list of layers, in which an entrance replaces each
of the first layers. It returns the first part's hidden states instead of its input. The forward still looks up
embeddings, but they are never computed.

Forwards make one mask per kind of attention, from the cache of the first layer of that kind, and read positions there.
In the second part that layer may be one that does not run; its slot then holds the cache of the first running layer of
the same kind. So each part works with its own caches, and these may hold different numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, make_prompt_cache

from ..arrays import Positions
from ..cache.positioned import hold_alike, leaves
from ..errors import SparseUnsupportedError
from .active import Active
from .depth import FirstLayers, Observed, StandIn, layers_of, replace_layers

_hidden: Active[mx.array] = Active()


class UpperLayers:
    """The layers of a model behind its first ones: their hidden states (B, L, ...) to logits (B, L, V).

    Attributes:
        slots: indices of these layers' caches in the whole model's list.
    """

    def __init__(self, lower: FirstLayers) -> None:
        whole = lower.whole
        first = layers_of(whole)[: lower.count]
        results = zip(first, _results(whole, first), strict=True)
        self._model = replace_layers(whole, {id(layer): _Entrance(layer, count) for layer, count in results})
        self._whole = whole
        caches = make_prompt_cache(whole)
        self.slots = tuple(slot for slot in range(len(caches)) if slot not in lower.slots)
        self._instead = {slot: _stand_in(caches, slot, self.slots) for slot in lower.slots}

    def __call__(self, inputs: mx.array, hidden: mx.array, cache: Sequence[Any]) -> mx.array:
        """
        Args:
            inputs: the tokens (B, L) of these hidden states; some models read them in every layer.
            cache: of these layers only.
        """
        every: list[Any] = list(make_prompt_cache(self._whole))
        for slot, part in zip(self.slots, cache, strict=True):
            every[slot] = part
        for slot, other in self._instead.items():
            every[slot] = every[slot] if other is None else every[other]
        with _hidden.during(hidden):
            logits: mx.array = self._model(inputs, cache=every)
        return logits


class StagedModel:
    """Both parts of a model, which read a prompt one after the other. The whole model goes on behind `unite`.

    Attributes:
        whole: the model; its weights are used in place.
        count: first layers.
    """

    def __init__(self, whole: nn.Module, count: int) -> None:
        """
        Raises:
            SparseUnsupportedError: its layers can't be run in two parts.
        """
        self.whole = whole
        self.count = count
        self.lower = FirstLayers(whole, count)
        self.upper = UpperLayers(self.lower)
        self._check()

    def split(self, cache: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the caches of the first layers, and those of the others."""
        return [cache[slot] for slot in self.lower.slots], [cache[slot] for slot in self.upper.slots]

    def join(self, lower: Sequence[Any], upper: Sequence[Any]) -> list[Any]:
        """Return all caches of the whole model, in order. Extra caches in `lower` are ignored."""
        by_slot = dict(zip(self.lower.slots, lower, strict=False)) | dict(zip(self.upper.slots, upper, strict=True))
        return [by_slot[slot] for slot in sorted(by_slot)]

    def unite(self, cache: Sequence[Any], read: Positions) -> None:
        """Drop from the first layers' caches what the others did not read.

        Args:
            read: (N,) int32, ascending: positions of the prompt that these have read, recalled ones aside.
        """
        hold_alike(*self.split(cache), read)

    def _check(self) -> None:
        """Check that the model can be split. Computes nothing."""
        tokens = mx.zeros((1, 2), dtype=mx.int32)
        cache = make_prompt_cache(self.whole)
        _, upper = self.split(cache)
        try:
            hidden = self.lower(tokens, cache=self.lower.make_cache())
            self.upper(tokens, hidden, upper)
        except (TypeError, ValueError, IndexError, AttributeError, KeyError) as error:
            raise SparseUnsupportedError(f"its layers from {self.count} on can't be run alone ({error})") from error
        if hidden.ndim != 3 or hidden.shape[:2] != (1, 2):
            raise SparseUnsupportedError("its layers pass on more than one hidden state per token")
        if any(leaf.empty() for leaf in leaves(upper)):
            raise SparseUnsupportedError(f"some of its layers from {self.count} on have no cache of their own")


class _Entrance(StandIn):
    """Returns given hidden states instead of running.

    Args:
        results: number of values that the layer returns; those after the hidden states are None.
    """

    def __init__(self, layer: nn.Module, results: int | None) -> None:
        super().__init__(layer)
        self.results = results

    def _of_part(self, part: nn.Module) -> nn.Module:
        return _Part(part)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = _hidden.value
        return hidden if self.results is None else (hidden, *[None] * (self.results - 1))


class _Part(StandIn):
    """Part of a layer that does not run; only its attributes can be used."""

    def _of_part(self, part: nn.Module) -> nn.Module:
        return _Part(part)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("its forward calls parts of layers")


def _results(whole: nn.Module, layers: Sequence[nn.Module]) -> list[int | None]:
    """Return the number of values that each layer returns, None if it is no tuple. Computes nothing."""
    seen: list[list[Any]] = [[] for _ in layers]
    observed = {id(layer): Observed(layer, results) for layer, results in zip(layers, seen, strict=True)}
    replace_layers(whole, observed)(mx.zeros((1, 2), dtype=mx.int32), cache=make_prompt_cache(whole))
    last = [results[-1] if results else None for results in seen]
    return [len(result) if isinstance(result, tuple) else None for result in last]


def _stand_in(caches: Sequence[Any], slot: int, others: Sequence[int]) -> int | None:
    """Return the slot whose cache a forward finds in this one: the first of its kind, else any with positions."""
    alike = (other for other in others if _kind(caches[other]) == _kind(caches[slot]))
    positioned = (other for other in others if hasattr(caches[slot], "offset") and hasattr(caches[other], "offset"))
    return next(alike, next(positioned, None))


def _kind(cache: Any) -> Hashable:
    if isinstance(cache, CacheList):
        return tuple(_kind(part) for part in cache.caches)
    return type(cache), getattr(cache, "max_size", None)
