"""Estimates the keys and values of tokens that a target does not read, from the states of its draft.

The draft reads every token, and its state there says much of what the target would hold: a linear map, fitted once for
a pair (`calibration/fitting_estimates`), gives the keys before rotation and the values of every attention layer. The
state is first brought to a code of a few hundred numbers, which all layers share (reduced-rank regression; Izenman
1975).

Some is known exactly, and is not estimated. Where the draft is the target's own first layers, the keys and values of
these are the draft's. Elsewhere those of the first layer follow from the tokens alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..arrays import Bools, Positions
from ..cache.positioned import (
    Positioned,
    PositionedKVCache,
    leaves,
    make_positioned_cache,
    place,
)
from ..errors import LoadError, SparseUnsupportedError
from ..request import TokenIds
from .depth import FirstLayers
from .moved_keys import check_equal, layer_rotations, rotated, unrotated
from .rotation import RotationCall

FORMAT = "mlx-specprefill estimates 1"


@dataclass(frozen=True, eq=False)
class Estimates:
    """A linear map from a draft's states (F,) to the keys and values of a target's attention layers.

    Attributes:
        centre, scale: of the states, (F,) float32.
        limit: mean square of a centred and scaled state above which it is unlike all that the map was fitted on.
        basis: (F, R).
        weights: (R, K + V) by the number of a layer's cache, keys of all heads first.
        offsets: (K + V,) by the same.
    """

    centre: mx.array
    scale: mx.array
    limit: float
    basis: mx.array
    weights: dict[int, mx.array]
    offsets: dict[int, mx.array]

    def __post_init__(self) -> None:
        mx.eval(self.centre, self.scale, *self._arrays)  # a lazy array can be computed only on the thread that made it

    @property
    def _arrays(self) -> list[mx.array]:
        return [self.basis, *self.weights.values(), *self.offsets.values()]

    @property
    def nbytes(self) -> int:
        """Return the bytes of what serves the target; the basis is the draft's."""
        return sum(array.nbytes for array in (*self.weights.values(), *self.offsets.values()))

    def codes(self, states: mx.array) -> tuple[mx.array, mx.array]:
        """Return the codes (L, R) of states (L, F), and whether each of these is like those of the fit, (L,)."""
        return code(states, self.centre, self.scale, self.limit, self.basis)

    def of_layer(self, layer: int, codes: mx.array) -> mx.array:
        """Return a layer's unrotated keys and values, (L, K + V), from codes (L, R)."""
        return codes @ self.weights[layer] + self.offsets[layer]

    def cast(self, dtype: mx.Dtype) -> Estimates:
        """Return the map in a target's dtype."""
        weights, offsets = ({k: a.astype(dtype) for k, a in part.items()} for part in (self.weights, self.offsets))
        return Estimates(self.centre, self.scale, self.limit, self.basis.astype(dtype), weights, offsets)

    def write(self, file: Path) -> None:
        """Write the map to a file, in bfloat16."""
        arrays = {"centre": self.centre, "scale": self.scale, "basis": self.basis.astype(mx.bfloat16)}
        for layer, weights in self.weights.items():
            arrays[f"weights.{layer}"] = weights.astype(mx.bfloat16)
            arrays[f"offsets.{layer}"] = self.offsets[layer].astype(mx.bfloat16)
        mx.save_safetensors(str(file), arrays, {"format": FORMAT, "limit": repr(self.limit)})


def read_estimates(file: Path) -> Estimates:
    """Read a map that `Estimates.write` wrote.

    Raises:
        LoadError: the file can't be read, or holds something else.
    """
    arrays: dict[str, mx.array]
    known: dict[str, str]
    try:
        arrays, known = mx.load(str(file), format="safetensors", return_metadata=True)  # type: ignore[assignment]
        if known.get("format") != FORMAT:
            raise ValueError("no estimates that this version reads")
        layers = [int(name.partition(".")[2]) for name in arrays if name.startswith("weights.")]
        weights, offsets = ({n: arrays[f"{part}.{n}"] for n in layers} for part in ("weights", "offsets"))
        limit = float(known["limit"])
        return Estimates(arrays["centre"], arrays["scale"], limit, arrays["basis"], weights, offsets)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise LoadError(f"{file}: {error}") from error


class CodedDraft(FirstLayers):
    """First layers of a draft that keep a code of each token that they read, in a cache behind their own.

    So what has a draft's cached prefix has the codes, too.

    Args:
        inner: the first layers, with retrieval heads or without.
    """

    inner: FirstLayers

    def __init__(self, inner: FirstLayers, estimates: Estimates) -> None:
        nn.Module.__init__(self)
        object.__setattr__(self, "whole", inner.whole)
        self.inner, self.count, self.slots = inner, inner.count, inner.slots
        self.basis, self.centre, self.scale, self.limit = (
            estimates.basis,
            estimates.centre,
            estimates.scale,
            estimates.limit,
        )

    @property
    def layers(self) -> list[nn.Module]:
        return self.inner.layers

    def make_cache(self) -> list[Any]:
        return [*self.inner.make_cache(), KVCache()]

    def __call__(self, inputs: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        if cache is None:
            return self.inner(inputs, None)
        states = self.inner(inputs, cache[:-1])
        codes, alike = code(states, self.centre, self.scale, self.limit, self.basis)
        cache[-1].update_and_fetch(codes[:, None], alike[:, None, :, None].astype(codes.dtype))
        return states


def code(
    states: mx.array, centre: mx.array, scale: mx.array, limit: float, basis: mx.array
) -> tuple[mx.array, mx.array]:
    """Return the codes (..., R) of states (..., F), and whether each of these is like those of the fit, (...)."""
    scaled = (states.astype(mx.float32) - centre) * scale
    return scaled.astype(basis.dtype) @ basis, (scaled * scaled).mean(axis=-1) <= limit


class Known:
    """The draft's knowledge of a prompt.

    Args:
        tokens: of the prompt.
        cache: of a coded draft, which holds the prompt.
        wanted: bool (M,), the tokens that are to be estimated where that can be; the others stay absent.
    """

    def __init__(self, tokens: TokenIds, cache: Sequence[Any], wanted: Bools) -> None:
        self.tokens, self.cache = tokens, cache
        self._codes: mx.array = cache[-1].keys[0, 0]
        alike = np.array(cache[-1].values[0, 0, :, 0].astype(mx.float32)) > 0.5
        held = min(int(cache[-1].offset), wanted.size)
        self._usable: Bools = alike[:held] & wanted[:held]

    def may_estimate(self, positions: Positions) -> Bools:
        """Return which of the tokens at these positions are wanted, and have a code that the map may be used for."""
        there = positions < self._usable.size
        return there & self._usable[np.where(there, positions, 0)]

    def codes(self, positions: Positions) -> mx.array:
        """Return the codes at these positions, (N, R); of tokens that have none, anything."""
        return self._codes[mx.array(np.minimum(positions, self._usable.size - 1))]


class Layers:
    """The layers of a target, by the numbers of their caches: which are known exactly, and which are to be estimated.

    Args:
        draft: the pair's, as it scores.

    Attributes:
        rotations: of each cache's keys; None where it holds none.
        own: the draft's cache by the number of the target's, where the draft is the target's own first layers.
        made: numbers of the caches that are to be estimated, with the numbers that each token has there.
        dtype: of keys and values.

    Raises:
        SparseUnsupportedError: the target's keys are not what its rotations make of unrotated ones.
    """

    def __init__(self, target: nn.Module, draft: nn.Module) -> None:
        for part in make_positioned_cache(target):
            if sum(isinstance(leaf, Positioned) for leaf in leaves([part])) > 1:
                raise SparseUnsupportedError("its layers keep two kinds of keys, of which one chooses the other")
        self.rotations = layer_rotations(target)
        self.own = _own_caches(target, draft)
        self._first = None if 0 in self.own or self.rotations[0] is None else _first_layer(target)
        exact = {*self.own, *([] if self._first is None else [0])}
        known = {number: one for number, one in enumerate(self.rotations) if one is not None}
        self.made = {n: sum(map(math.prod, one.shapes)) for n, one in known.items() if n not in exact}
        if not self.made:
            raise SparseUnsupportedError("no layer's keys are to be estimated")
        self.dtype = known[min(self.made)].dtype

    def exact(self, layer: int, known: Known, positions: Positions) -> tuple[mx.array, mx.array]:
        """Return the keys and values (1, H, N, D) of a layer that is not estimated."""
        if layer in self.own:
            part, at = list(leaves(known.cache))[self.own[layer]], mx.array(positions)
            return part.keys[..., at, :], part.values[..., at, :]
        assert self._first is not None, "every other layer is estimated"
        return first_keys(self._first, known.tokens, positions)

    def rotated(self, layer: int, flat: mx.array, positions: Positions) -> tuple[mx.array, mx.array]:
        """Return rotated keys and values (1, H, N, D) from unrotated ones (N, K + V)."""
        made, start = [], 0
        for (heads, size), call in self._parts(layer):
            part = flat[:, start : start + heads * size].reshape(1, -1, heads, size).swapaxes(1, 2)
            made.append(rotated(part, call, positions))
            start += heads * size
        return made[0], made[1]

    def unrotated(self, layer: int, part: Positioned, start: int, end: int) -> mx.array:
        """Return the unrotated keys and values of a dense cache's latest tokens [start, end), (N, K + V)."""
        stored, flat = part.stored, []
        for array, (_, call) in zip((part.keys, part.values), self._parts(layer), strict=True):
            rows = unrotated(array[..., stored - (end - start) : stored, :], call, start)
            flat.append(rows[0].swapaxes(0, 1).reshape(end - start, -1))
        return mx.concatenate(flat, axis=1)

    def parts(self, layer: int) -> tuple[slice, slice]:
        """Return where a layer's keys and its values stand among the numbers of a token."""
        (heads, size), _ = self._parts(layer)[0]
        return slice(0, heads * size), slice(heads * size, None)

    def _parts(self, layer: int) -> list[tuple[tuple[int, int], RotationCall | None]]:
        rotation = self.rotations[layer]
        assert rotation is not None, "a recurrent layer has no keys"
        return list(zip(rotation.shapes, rotation.calls, strict=True))


class Estimator:
    """Puts estimates into a target's cache.

    Args:
        draft: the pair's, as it scores.

    Raises:
        SparseUnsupportedError: as in `Layers`, or the map is another target's.
    """

    def __init__(self, target: nn.Module, draft: nn.Module, estimates: Estimates) -> None:
        self.layers = Layers(target, draft)
        self.estimates = estimates.cast(self.layers.dtype)
        if {n: offsets.size for n, offsets in estimates.offsets.items()} != self.layers.made:
            raise SparseUnsupportedError("the estimates are those of a target with other layers")

    def place(self, cache: Sequence[Any], positions: Positions, known: Known) -> None:
        """Set the positions of the next forward, with estimates of the tokens in front of and among them.

        A token without an estimate stays absent.

        Args:
            positions: as in `cache.positioned.place`.
        """
        first = next(part.next for part in leaves(cache) if isinstance(part, Positioned))
        between = np.arange(first, int(positions[-1]) + 1, dtype=np.int32)
        reading = np.isin(between, positions, assume_unique=True)
        held = reading | known.may_estimate(between)
        if np.count_nonzero(held) <= positions.size:
            place(cache, positions)
            return
        between, reading, on_device = between[held], reading[held], mx.array(positions)[None]
        codes = known.codes(between).astype(self.layers.dtype)
        for layer, part in enumerate(leaves(cache)):
            if isinstance(part, Positioned):
                if layer in self.layers.made:
                    made = self.layers.rotated(layer, self.estimates.of_layer(layer, codes), between)
                else:
                    made = self.layers.exact(layer, known, between)
                part.estimate(between, *made, reading, on_device)


def _own_caches(target: nn.Module, draft: nn.Module) -> dict[int, int]:
    """Return, for a draft of the target's own first layers, the draft's cache by the number of the target's.

    Only caches that hold the whole prompt count.
    """
    if not (isinstance(draft, FirstLayers) and draft.whole is target):
        return {}
    sizes = [len(list(leaves([part]))) for part in make_prompt_cache(target)]
    theirs = [n + sum(sizes[:slot]) for slot in draft.slots for n in range(sizes[slot])]
    kinds = [type(part) for part in leaves(draft.make_cache())]
    return {number: n for n, (number, kind) in enumerate(zip(theirs, kinds, strict=False)) if kind is KVCache}


def _first_layer(target: nn.Module) -> FirstLayers:
    """Return a target's first layer, whose keys follow from the tokens alone.

    Raises:
        SparseUnsupportedError: they do not.
    """
    first, cache, tokens = FirstLayers(target, 1), make_positioned_cache(target), np.arange(1, 9, dtype=np.int32)
    mx.eval(target(mx.array(tokens)[None], cache=cache))
    whole = next(leaves(cache))
    positions = np.arange(tokens.size, dtype=np.int32)
    for made, there in zip(first_keys(first, tokens, positions), (whole.keys, whole.values), strict=True):
        check_equal(made, there[..., : tokens.size, :], "the keys of its first layer do not follow from the tokens")
    return first


def first_keys(first: FirstLayers, tokens: TokenIds, positions: Positions) -> tuple[mx.array, mx.array]:
    """Return the first layer's keys and values of these tokens of a prompt, (1, H, N, D); nothing else is computed."""
    cache = PositionedKVCache()
    place([cache], positions)
    first(mx.array(tokens[positions])[None], cache=[cache])
    return cache.keys[..., : positions.size, :], cache.values[..., : positions.size, :]
