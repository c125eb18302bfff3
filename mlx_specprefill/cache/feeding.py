"""Feeds tokens at their original positions, forward by forward."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from ..arrays import Positions
from ..errors import SparseUnsupportedError
from ..request import TokenIds
from .positioned import Positioned, leaves, place

Placing = Callable[[list[Any], Positions], None]  # sets the positions of the next forward in every layer
# Tokens of the last forward. One alone would cost a whole pass over the weights. A few rows add little to the output
# projection, which runs over all of them. Up to twice as many are not worth a second pass.
TAIL = 32


def feed(
    model: Callable[..., mx.array],
    cache: list[Any],
    tokens: TokenIds,
    positions: Positions | None,
    ends: Iterable[int],
    logits: bool = False,
    placing: Placing = place,
) -> Generator[tuple[int, mx.array | None], None, None]:
    """Feed tokens, forward by forward. Yield after each the count of fed tokens, and None or the last token's logits.

    After a sparse prefill the cache decodes from the next position although it holds fewer tokens.

    Args:
        model: called as `model(tokens, cache=cache)` with tokens (1, L). Its other output is never computed.
        cache: positioned, if there are positions; any mlx-lm cache without.
        tokens: N token ids.
        positions: int32 (N,), ascending, or those of recalled tokens; None: they follow what the cache holds.
        ends: counts of tokens at which forwards end, ascending, up to N. Each is asked for before its forward.
        placing: sets the positions of the next forward in every layer.
        logits: compute those of the last token, (1, V), in the model's dtype.

    Raises:
        SparseUnsupportedError: the cache can't hold positions.
    """
    if positions is not None and not any(isinstance(part, Positioned) for part in leaves(cache)):
        raise SparseUnsupportedError("no layer of the cache holds positions")
    ids, start = mx.array(tokens)[None], 0
    for end in ends:
        if positions is not None:
            placing(cache, positions[start:end])
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
