"""Runs a model layer by layer on the hidden states of an earlier run, so that rounding can't add up in comparisons.

Two runs then differ by the rounding of one layer at a time, however deep the model is, and however often rounding
sends a token to another expert.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .depth import layers_of, replace_layers

# By the layer's number, its call within a forward, and the token: (1, 1, ...).
Hidden = Mapping[tuple[int, int, int], mx.array]


class Relay:
    """Runs of one model.

    Attributes:
        whole: the model; `model`: a copy of it around the same layers, which are given hidden states.
        given: those that the layers get instead of what comes to them; empty: they get that.
    """

    def __init__(self, whole: nn.Module) -> None:
        self.whole = whole
        self.model = replace_layers(whole, {id(one): _twin(one, i, self) for i, one in enumerate(layers_of(whole))})
        self.given: Hidden = {}
        self._tokens = range(0)
        self._came: dict[tuple[int, int, int], mx.array] = {}
        self._calls: Counter[int] = Counter()

    def expect(self, tokens: range) -> None:
        """Say which tokens the next forward has."""
        self._tokens = tokens
        self._calls.clear()

    def arrived(self) -> Hidden:
        """Return what came to the layers since the last call, but not to those that are called part by part."""
        came, self._came = self._came, {}
        return came

    def pass_on(self, layer: int, hidden: mx.array) -> mx.array:
        """Return the hidden states that a layer gets instead of these, (1, L, ...)."""
        if hidden.shape[:2] != (1, len(self._tokens)):
            return hidden
        call = self._calls[layer]
        self._calls[layer] += 1
        keys = [(layer, call, token) for token in self._tokens]
        for i, key in enumerate(keys):
            self._came[key] = hidden[:, i : i + 1]
        if any(key not in self.given for key in keys):
            return hidden
        # Another rank waits until what it sends is received.
        given: mx.array = mx.depends(mx.concatenate([self.given[key] for key in keys], axis=1), hidden)
        return given


def _twin(layer: nn.Module, number: int, relay: Relay) -> nn.Module:
    """Return the layer with a call that runs on what the relay passes on. Some forwards ask for a layer's class."""
    kind = type(layer)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        at = next((i for i, value in enumerate(values) if isinstance(value, mx.array)), None)
        if at is not None:
            values[at] = relay.pass_on(number, values[at])
        return kind.__call__(self, *values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))

    twin = copy.copy(layer)
    twin.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    return twin
