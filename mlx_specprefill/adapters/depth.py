"""The first layers of a model, as a model that shares its weights.

No forward is copied or taken apart. A shallow copy of the modules around the list of layers gets another list: the
first layers unchanged, and a stop in place of each other layer, which ends the forward with its input. The list keeps
its length, and so does the forward's list of caches, so lookups by a layer's index (kinds of attention, masks, inputs
per layer) still work. The modules after the stop, including the final norm and the output projection, never run.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..cache.positioned import leaves
from ..errors import SparseUnsupportedError


class FirstLayers(nn.Module):  # type: ignore[misc]
    """The first `count` layers of `whole`: tokens (B, L) to the hidden states (B, L, ...) for the next layer.

    Every parameter is the same array as in `whole`, which is not changed: both can be used in turn.

    Attributes:
        whole: the model; not one of this module's children.
        count: layers that run.
        model: the shallow copy, with stops.
        slots: indices of these layers' caches in the whole model's list.
    """

    whole: nn.Module
    count: int

    def __init__(self, whole: nn.Module, count: int) -> None:
        super().__init__()
        stops: dict[int, nn.Module] = {id(layer): _Stop(layer) for layer in layers_of(whole)[count:]}
        self.model = replace_layers(whole, stops)
        if self.model is whole:
            raise SparseUnsupportedError("its layers are not kept in a list")
        object.__setattr__(self, "whole", whole)
        self.count = count
        self.slots = self._used_caches()

    @property
    def layers(self) -> list[nn.Module]:
        return layers_of(self.whole)[: self.count]

    @property
    def spans_prompt(self) -> bool:
        """Return whether one of the layers keeps the keys of the whole prompt, so that its attention can score it."""
        return any(type(part) is KVCache for part in leaves(self.make_cache()))

    def make_cache(self) -> list[Any]:
        """Return the caches of these layers only, as `make_prompt_cache` makes them for the whole model."""
        whole = make_prompt_cache(self.whole)
        return [whole[slot] for slot in self.slots]

    def __call__(self, inputs: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        if cache is None:
            return self._hidden(inputs, None)
        every = list(make_prompt_cache(self.whole))  # the other layers' caches stay empty
        for slot, part in zip(self.slots, cache, strict=True):
            every[slot] = part
        return self._hidden(inputs, every)

    def _hidden(self, inputs: mx.array, cache: list[Any] | None) -> mx.array:
        try:
            self.model(inputs, cache=cache)
        except _Stopped as stopped:
            return stopped.hidden
        raise SparseUnsupportedError(f"its forward ends before layer {self.count}")

    def _used_caches(self) -> tuple[int, ...]:
        """Return the indices of the whole model's caches that these layers write. Computes nothing."""
        cache = list(make_prompt_cache(self.whole))
        self._hidden(mx.zeros((1, 2), dtype=mx.int32), cache)
        return tuple(slot for slot, part in enumerate(cache) if any(not leaf.empty() for leaf in leaves([part])))


def first_layers(model: nn.Module, count: int) -> nn.Module:
    """Return the first `count` layers, or the model itself if it has no more layers.

    Args:
        model: a model of mlx-lm, or first layers of one.

    Raises:
        ValueError: fewer than one layer, or more than the model has.
        SparseUnsupportedError: none of these layers sees the whole prompt, or its forward can't be ended early.
    """
    total = len(layers_of(model))
    if not 1 <= count <= total:
        raise ValueError(f"it has {total} layers, so the first {count} of them can't be run")
    if count == total:
        return model
    shallow = FirstLayers(full_draft_model(model), count)
    if not shallow.spans_prompt:
        raise SparseUnsupportedError(
            f"none of its first {count} layers sees the whole prompt: it takes {smallest_depth(model)}"
        )
    return shallow


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers in running order."""
    return list(model.layers)


def smallest_depth(model: nn.Module) -> int:
    """Return the smallest number of first layers with one that sees the whole prompt; at most all layers."""
    total = len(layers_of(model))
    return next((count for count in range(1, total) if FirstLayers(full_draft_model(model), count).spans_prompt), total)


def full_draft_model(model: nn.Module) -> nn.Module:
    """Return the model that these first layers belong to; a whole model is returned unchanged."""
    return model.whole if isinstance(model, FirstLayers) else model


class _Stopped(Exception):  # noqa: N818 - a control signal, not an error
    """Ends a forward at a stop."""

    def __init__(self, hidden: mx.array) -> None:
        super().__init__()
        self.hidden = hidden


class StandIn(nn.Module):  # type: ignore[misc]
    """Stands in for a layer, or for a part of one, with its attributes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_layer", layer)

    def __getattr__(self, name: str) -> Any:
        value = getattr(object.__getattribute__(self, "_layer"), name)
        return self._of_part(value) if isinstance(value, nn.Module) else value

    def _of_part(self, part: nn.Module) -> nn.Module:
        return part


class Observed(StandIn):
    """Runs the layer and reports its results.

    Args:
        seen: called with the results.
    """

    def __init__(self, layer: nn.Module, seen: list[Any]) -> None:
        super().__init__(layer)
        object.__setattr__(self, "_seen", seen)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        returned = object.__getattribute__(self, "_layer")(*args, **kwargs)
        object.__getattribute__(self, "_seen").append(returned)
        return returned


class _Stop(StandIn):
    """Ends the forward when it is called.

    Its submodules are stops too, because some forwards call those instead of the layer.
    """

    def _of_part(self, part: nn.Module) -> nn.Module:
        return _Stop(part)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _Stopped(next(value for value in (*args, *kwargs.values()) if isinstance(value, mx.array)))


def replace_layers(module: nn.Module, twins: Mapping[int, nn.Module]) -> nn.Module:
    """Return the module, or a shallow copy of it if a list below it holds layers with a twin, by the layer's id."""
    changed: dict[str, Any] = {}
    for name, value in module.items():
        if isinstance(value, list) and any(id(part) in twins for part in value):
            changed[name] = [twins.get(id(part), part) for part in value]
        elif isinstance(value, nn.Module) and (twin := replace_layers(value, twins)) is not value:
            changed[name] = twin
    if not changed:
        return module
    copied = copy.copy(module)
    dict.update(copied, changed)  # `Module.update` is something else
    return copied
