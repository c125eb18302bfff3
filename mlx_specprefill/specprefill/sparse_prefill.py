"""Feeds tokens at their original positions, forward by forward; recalls dropped ones; keeps what first layers pass on.

A staged prefill has two parts: the target's first layers read the whole prompt, the others the kept tokens. A scorer
reads the prompt with the first layers and keeps the hidden states. After the selection the other layers continue from
there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from ..adapters.staged import UpperLayers
from ..arrays import Bools, Indices, Positions
from ..cache.positioned import Positioned, PositionedRotatingKVCache, leaves, place
from ..errors import SparseUnsupportedError
from ..request import TokenIds

# Tokens of the last forward. One alone would cost a whole pass over the weights. A few rows add little to the output
# projection, which runs over all of them. Up to twice as many are not worth a second pass.
TAIL = 32

_Part = tuple[int, mx.array]  # index of the first token, hidden states (1, L, D)


def feed(
    model: Callable[..., mx.array],
    cache: list[Any],
    tokens: TokenIds,
    positions: Positions | None,
    ends: Iterable[int],
    logits: bool = False,
) -> Generator[tuple[int, mx.array | None], None, None]:
    """Feed tokens, forward by forward. Yield after each the count of fed tokens, and None or the last token's logits.

    After a sparse prefill the cache decodes from the next position although it holds fewer tokens.

    Args:
        model: called as `model(tokens, cache=cache)` with tokens (1, L). Its other output is never computed.
        cache: positioned, if there are positions; any mlx-lm cache without.
        tokens: N token ids.
        positions: int32 (N,), ascending, or those of recalled tokens; None: they follow what the cache holds.
        ends: counts of tokens at which forwards end, ascending, up to N. Each is asked for before its forward.
        logits: compute those of the last token, (1, V), in the model's dtype.

    Raises:
        SparseUnsupportedError: the cache can't hold positions.
    """
    if positions is not None and not any(isinstance(part, Positioned) for part in leaves(cache)):
        raise SparseUnsupportedError("no layer of the cache holds positions")
    ids, start = mx.array(tokens)[None], 0
    for end in ends:
        if positions is not None:
            place(cache, positions[start:end])
        output = model(ids[:, start:end], cache=cache)
        wanted = output[:, -1, :] if logits and end == ids.shape[1] else None
        mx.eval(wanted, [part.state for part in cache])
        yield end, wanted
        start = end


def forward_ends(total: int, step: Callable[[], int], cuts: Sequence[int] = (), tail: int = TAIL) -> Iterator[int]:
    """Yield the counts of `total` tokens at which forwards end.

    Args:
        step: returns the tokens of the next forward at most.
        cuts: counts at which one must end, ascending.
        tail: tokens of the last forward, all of whose rows reach the output projection; 0: it is like the others.
    """
    end, last = 0, max([total - tail if total > 2 * tail else 0, *(cut for cut in cuts if cut < total)])
    while end < last:
        most = min(end + step(), last)
        end = next((cut for cut in cuts if end < cut < most), most)
        yield end
    if end < total:
        yield total


class HiddenStates:
    """Hidden states that the first layers return for a prompt.

    Attributes:
        first: index below which no states are kept: the other layers have read these tokens.
        known: index below which the draft need not read again for them.
        cuts: lengths of the prompt's dense beginning, ascending, at which the first layers' cache is kept.
    """

    def __init__(
        self, first: int = 0, known: int | None = None, parts: Sequence[_Part] = (), cuts: Sequence[int] = ()
    ) -> None:
        """Args:
        parts: of an earlier turn.
        """
        self.first = first
        self.cuts = cuts
        self.known = first if known is None else known
        self._parts = list(parts)
        self._begun = False

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._parts)

    @property
    def end(self) -> int:
        """Return the index after the last state."""
        return max((start + states.shape[1] for start, states in self._parts), default=self.first)

    def keep(self, start: int, hidden: mx.array) -> None:
        """Keep the hidden states (1, L, D) of the tokens from index `start` on. Call in reading order."""
        skipped = max(0, self.first - start)
        new = hidden[:, skipped:]
        if new.shape[1]:
            mx.async_eval(new)  # type: ignore[no-untyped-call]  # the reader waits for its caches anyway
            if not self._begun:
                self._parts = _below(start + skipped, self._parts)
            self._begun = True
            self._parts.append((start + skipped, new))

    def covers(self, indices: Indices) -> bool:
        """Return whether the states of all these prompt indices are stored."""
        return sum(int(_within(part, indices).sum()) for part in self._parts) == indices.size

    def of(self, indices: Indices) -> mx.array:
        """Return the states (1, N, D) of the prompt's ascending indices (N,).

        Raises:
            ValueError: some are missing.
        """
        if not self.covers(indices):
            raise ValueError("hidden states of some tokens were not kept")
        found = [(part, indices[_within(part, indices)]) for part in self._parts]
        chosen = [states[:, mx.array(some - start)] for (start, states), some in found if some.size]
        return mx.concatenate(chosen, axis=1) if chosen else self._parts[0][1][:, :0]

    def between(self, start: int, end: int) -> tuple[int, mx.array] | None:
        """Return stored states of [start, end) without a gap, with the index of the first; None if there are none."""
        inside = [part for part in _below(end, self._parts) if part[0] + part[1].shape[1] > start]
        if not inside:
            return None
        first = behind = max(start, inside[0][0])
        states = []
        for begin, part in inside:
            if begin > behind:  # an answer: other states would be taken for those of its tokens
                break
            states.append(part[:, behind - begin :])
            behind = begin + part.shape[1]
        return first, mx.contiguous(mx.concatenate(states, axis=1))

    def clear(self) -> None:
        self._parts.clear()

    @property
    def nbytes(self) -> int:
        return sum(int(states.nbytes) for _, states in self._parts)


def _within(part: _Part, indices: Indices) -> Bools:
    start, states = part
    return (indices >= start) & (indices < start + states.shape[1])


def _below(end: int, parts: Sequence[_Part]) -> list[_Part]:
    return [(start, states[:, : end - start]) for start, states in parts if start < end]


class UpperLayersModel:
    """The upper layers as a model of tokens with known hidden states (1, N, D), in feeding order."""

    def __init__(self, upper: UpperLayers, hidden: mx.array) -> None:
        self._upper = upper
        self._hidden = hidden
        self._read = 0

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        start, self._read = self._read, self._read + inputs.shape[1]
        return self._upper(inputs, self._hidden[:, start : self._read], cache)


@contextmanager
def recalling(cache: Sequence[Any]) -> Iterator[None]:
    """Feed dropped tokens inside this block, behind what the cache holds; afterwards it is consistent.

    What a recalled token sees depends on the layer:

    - Full attention: all that the cache holds by then at positions up to its own, which is the original one. A window
      restricts it to positions within the window.
    - Recurrent layers: everything that was fed before it, in the order of feeding.
    - Sliding windows on a ring: the tokens of its own recall alone, within the window by position. The ring is set
      aside during the recall and is afterwards as before, so that the most recent tokens stay in it.

    Whatever is fed later sees recalled tokens like any others, except in rings.
    """
    rings = [part for part in leaves(cache) if isinstance(part, PositionedRotatingKVCache)]
    held = [ring.state for ring in rings]
    for ring in rings:
        ring.state = RotatingKVCache(ring.max_size).state, ring.next, []
    try:
        yield
    finally:
        for ring, state in zip(rings, held, strict=True):
            ring.state = state
