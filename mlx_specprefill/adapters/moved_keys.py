"""Moves cached keys to other positions, by the rotation that each layer of a model has given them.

A rotation by p and then by s is one by p + s, so keys need not be computed again. Each layer's call of RoPE is recorded
in a short forward; a second one at other positions shows whether that is all that positions change.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..arrays import Positions
from ..cache.held import HeldTokens
from ..cache.positioned import Positioned, PositionedKVCache, leaves, make_positioned_cache, place
from ..errors import SparseUnsupportedError
from .rotation import RotationCall, record_rotations

_BY_LENGTH = "DynamicNTKScalingRoPE"
_PROBED = 8  # tokens
_FAR = 1021  # positions
_NEXT = 4  # calls of RoPE among which a layer's is: queries and keys, each in two parts at most
_TOLERANCE = {mx.float32: 1e-3, mx.float16: 0.05, mx.bfloat16: 0.1}  # of the largest value, over all layers


class LayerRotation(NamedTuple):
    """The rotations of a layer's keys, and of its values where a part of the keys is kept there; None: not rotated.

    Attributes:
        calls: of keys and values.
        shapes: heads of keys and values, and the numbers of each head.
        dtype: of both.
    """

    calls: tuple[RotationCall | None, RotationCall | None]
    shapes: tuple[tuple[int, int], tuple[int, int]]
    dtype: mx.Dtype


class Piece(NamedTuple):
    """Tokens of one text that another one has, too: `size` of them, from `old` on, which stand from `new` on there."""

    old: int
    new: int
    size: int


def movable_layers(model: nn.Module) -> list[LayerRotation]:
    """Return each layer's rotation, of a model whose whole cache can be moved.

    Raises:
        SparseUnsupportedError: a layer has another cache than plain attention's, or as in `layer_rotations`.
    """
    if any(type(part) is not PositionedKVCache for part in leaves(make_positioned_cache(model))):
        raise SparseUnsupportedError("windows and recurrent states can't be moved")
    return [one for one in layer_rotations(model) if one is not None]


def layer_rotations(model: nn.Module) -> list[LayerRotation | None]:
    """Return the rotation of each cache of a model; None where it holds no keys.

    Raises:
        SparseUnsupportedError: keys at other positions are not the rotated ones.
    """
    if any(type(module).__name__ == _BY_LENGTH for module in model.modules()):
        raise SparseUnsupportedError("its rotations change with the text's length")
    near, far = make_positioned_cache(model), make_positioned_cache(model)
    tokens, positions = mx.arange(1, _PROBED + 1)[None], np.arange(_PROBED, dtype=np.int32)
    with record_rotations() as calls:
        place(near, positions)
        mx.eval(model(tokens, cache=near))
    place(far, positions + _FAR)
    mx.eval(model(tokens, cache=far))
    rotations, behind = list[LayerRotation | None](), calls
    for part, other in zip(leaves(near), leaves(far), strict=True):
        if not isinstance(part, Positioned) or part.empty():
            rotations.append(None)
            continue
        found: list[RotationCall | None] = [None, None]
        for which, array in enumerate(_arrays(part)):
            found[which] = next((call for call in behind[:_NEXT] if _is_output(call, array)), None)
        if any(found):
            behind = behind[1 + max(behind.index(call) for call in found if call is not None) :]
        for rotation, here, there in zip(found, _arrays(part), _arrays(other), strict=True):
            check_equal(_moved(here, rotation, _FAR), there, "keys at other positions are not the rotated ones")
        keys, values = ((array.shape[1], array.shape[3]) for array in _arrays(part))
        rotations.append(LayerRotation((found[0], found[1]), (keys, values), part.keys.dtype))
    return rotations


def move(
    cache: Sequence[Any], rotations: Sequence[LayerRotation], pieces: Sequence[Piece], edited: int | None = None
) -> None:
    """Make a cache hold what it has of these pieces alone, at the new places. The last ends the prompt.

    They ascend, but for the front, which stays in the order of feeding: that shows what was read before a gap was
    filled.

    Args:
        edited: the first position from which on tokens stand behind other text than they were read with; they are
            estimates there. None: the text is the same.
    """
    for part, rotation in zip(leaves(cache), rotations, strict=True):
        if not part.empty():
            taken, held = _slots_of(part.held, pieces, edited)
            keys, values = (
                _joined(array, call, taken)
                for array, call in zip((part.keys, part.values), rotation.calls, strict=True)
            )
            part.state = (keys, values, held.size), pieces[-1].new + pieces[-1].size, held.runs()
            mx.eval(part.state)


def moved_tokens(held: HeldTokens, pieces: Sequence[Piece], edited: int | None) -> HeldTokens:
    """Return the tokens that a cache holds behind `move`."""
    return _slots_of(held, pieces, edited)[1]


def cut(cache: Sequence[Any], length: int) -> list[tuple[mx.array, mx.array]]:
    """Cut a dense cache to its first `length` tokens. Return the keys and values of each layer that it had before."""
    whole = []
    for part in leaves(cache):
        whole.append((part.keys, part.values))
        if not part.empty():
            part.state = part.keys[..., :length, :], part.values[..., :length, :], length
    return whole


def append(
    cache: Sequence[Any], whole: Sequence[tuple[Any, Any]], rotations: Sequence[LayerRotation], piece: Piece
) -> None:
    """Put a piece of what `cut` returned behind what a dense cache holds, which ends where the piece begins."""
    old, new, size = piece
    for part, arrays, rotation in zip(leaves(cache), whole, rotations, strict=True):
        if not part.empty():
            parts = zip((part.keys, part.values), arrays, rotation.calls, strict=True)
            keys, values = (
                mx.concatenate([front[..., :new, :], _moved(array[..., old : old + size, :], call, new - old)], axis=2)
                for front, array, call in parts
            )
            part.state = keys, values, new + size
            mx.eval(part.state)


def _slots_of(
    held: HeldTokens, pieces: Sequence[Piece], edited: int | None
) -> tuple[list[tuple[Positions, int]], HeldTokens]:
    """Return the slots of pieces with one shift, with that, and all tokens at their new places, as in `move`."""
    positions, marked, taken, moved = held.positions, held.marked, list[tuple[Positions, int]](), []
    order = np.argsort(positions).astype(np.int32)
    for shift, group in groupby(pieces, lambda piece: piece.new - piece.old):
        ends = [(old, np.searchsorted(positions, (old, old + size), sorter=order)) for old, _, size in group]
        slots = np.concatenate([order[start:end] if old else np.sort(order[start:end]) for old, (start, end) in ends])
        if slots.size:
            taken.append((slots, shift))
            new = positions[slots] + np.int32(shift)
            is_estimate = (marked[slots] < 0) | (edited is not None and new >= edited)
            moved.append(np.where(is_estimate, ~new, new))
    return taken, HeldTokens.of(np.concatenate([positions[:0], *moved]))


def _joined(array: mx.array, call: RotationCall | None, taken: Sequence[tuple[Positions, int]]) -> mx.array:
    return mx.concatenate([_moved(array[..., mx.array(slots), :], call, shift) for slots, shift in taken], axis=2)


def _arrays(part: Any) -> tuple[mx.array, ...]:
    return () if part.empty() else (part.keys[..., :_PROBED, :], part.values[..., :_PROBED, :])


def _is_output(call: RotationCall, array: mx.array) -> bool:
    return call.output.shape == array.shape and bool(mx.array_equal(call.output, array))


def _moved(array: mx.array, call: RotationCall | None, shift: int) -> mx.array:
    """Return keys (1, H, L, D) rotated by `shift` more positions."""
    if call is None or shift == 0:
        return array
    by = mx.full((1, array.shape[2]), abs(shift), dtype=mx.int32)
    if shift > 0:
        return call.rotate(array, by)
    mirror = _mirror(array.shape[-1], call).astype(array.dtype)  # a kernel may take offsets for unsigned
    return call.rotate(array * mirror, by) * mirror


def rotated(array: mx.array, call: RotationCall | None, positions: Positions) -> mx.array:
    """Return unrotated keys (1, H, L, D) as they are at these positions (L,), ascending."""
    if call is None:
        return array
    first, last = int(positions[0]), int(positions[-1])
    return call.rotate(array, first if last - first + 1 == positions.size else mx.array(positions)[None])


def unrotated(array: mx.array, call: RotationCall | None, start: int) -> mx.array:
    """Return keys (1, H, L, D) of consecutive tokens, the first at `start`, without their rotation."""
    if call is None:
        return array
    mirror = _mirror(array.shape[-1], call).astype(array.dtype)
    return call.rotate(array * mirror, start) * mirror


def _mirror(size: int, call: RotationCall) -> mx.array:
    """Return the signs (D,) that turn a rotation around: -1 for the second of each pair that is rotated."""
    index = np.arange(size)
    second = index % 2 == 1 if call.settings.get("traditional") else index >= call.dims // 2
    return mx.array(np.where(second & (index < call.dims), -1.0, 1.0).astype(np.float32))


def check_equal(made: mx.array, there: mx.array, refusal: str) -> None:
    """Check that keys are those that a model computes, but for rounding.

    Raises:
        SparseUnsupportedError: they are not.
    """
    differs = float(mx.abs(made.astype(mx.float32) - there.astype(mx.float32)).max())
    if not differs <= _TOLERANCE[there.dtype] * float(mx.abs(there.astype(mx.float32)).max()):
        raise SparseUnsupportedError(refusal)
