"""The published rule (SpecPrefill, arXiv 2502.02789, section 3.2): look-ahead rows, the maximum over layers and heads.

The draft reads the prompt, then N - 1 tokens of its own greedy answer. Each of these N query rows gives one attention
row per layer and head, smoothed over neighbouring tokens; importance is the mean over rows of the maximum over layers
and heads. Chunks of 32 tokens are chosen by their mean (`SelectionConfig.as_published`).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..adapters.capture import QueryCapture
from ..adapters.depth import FirstLayers
from ..config import ScoringConfig
from ..distributed.ranks import Ranks
from ..errors import SparseUnsupportedError
from ..request import Progress
from .scorer import Scores, ToScore, Undo, checked, read_prompt

__all__ = ["PaperScorer"]


@dataclass(frozen=True)
class PaperScorer:
    """Args:
    config: `rows`, `include_last_prompt_query` and `pool_width` count.
    ranks: over which the draft's heads are split.
    """

    config: ScoringConfig
    ranks: Ranks | None = None

    def score(self, draft: nn.Module, task: ToScore) -> Generator[Progress, None, Scores]:
        """See `Scorer`. First layers alone write no answer: the last prompt token is their one row."""
        M = task.prompt.size
        capture = QueryCapture(M, self.config.pool_width)
        yield from read_prompt(draft, task, M - 1)
        last = mx.array(task.prompt[-1:])[None]
        if isinstance(draft, FirstLayers):
            looked_ahead = _last_row(draft, last, capture, task)
        else:
            looked_ahead = _look_ahead(draft, last, capture, task.cache, self.config, self.ranks)
        yield Progress("draft", M, M)
        return _scores(capture, looked_ahead, self.config, task, self.ranks)


def _look_ahead(
    draft: nn.Module,
    last: mx.array,
    capture: QueryCapture,
    cache: list[Any],
    config: ScoringConfig,
    ranks: Ranks | None,
) -> mx.array:
    """Feed the last prompt token and the greedy tokens after it, capturing; the cache ends where it was after `last`.

    All steps are queued without waiting for a token's value: the end of the answer is looked for afterwards.
    """
    M = capture.prompt_len
    if config.include_last_prompt_query:
        with capture.row(M):
            logits = draft(last, cache=cache)
    else:
        logits = draft(last, cache=cache)
    undo = Undo(cache)
    fed = config.rows - len(capture.rows) if config.include_last_prompt_query else config.rows
    generated = [_greedy(logits, ranks)]
    for step in range(1, fed + 1):
        with capture.row(M + step):
            logits = draft(generated[-1][None], cache=cache)
        generated.append(_greedy(logits, ranks))
        mx.async_eval(generated[-1], capture.rows)  # type: ignore[no-untyped-call]
    undo.restore(fed)
    looked_ahead = mx.concatenate(generated)
    mx.eval(looked_ahead, capture.rows, [part.state for part in cache])
    return looked_ahead


def _greedy(logits: mx.array, ranks: Ranks | None) -> mx.array:
    """Return the likeliest next token (1,), rank 0's where there are several."""
    token = mx.argmax(logits[:, -1, :], axis=-1)
    return token if ranks is None else ranks.tokens(token)


def _last_row(draft: FirstLayers, last: mx.array, capture: QueryCapture, task: ToScore) -> mx.array:
    """Feed the last prompt token to layers that can't say what comes next: its own row, and no token."""
    with capture.row(capture.prompt_len):
        returned = draft(last, cache=task.cache)
    if task.seen is not None:
        task.seen(task.prompt.size - 1, returned)
    mx.eval(capture.rows, [part.state for part in task.cache])
    return mx.array([], dtype=mx.uint32)


def _scores(
    capture: QueryCapture, looked_ahead: mx.array, config: ScoringConfig, task: ToScore, ranks: Ranks | None
) -> Scores:
    if not capture.rows:
        raise SparseUnsupportedError("no attention layer of the draft sees the whole prompt")
    generated = [int(token) for token in np.array(looked_ahead)]
    ended = next((i for i, token in enumerate(generated) if token in task.stop_ids), len(generated))
    # Row t reads the token before generated[t] when the last prompt token is row 0, generated[t] itself otherwise.
    usable = ended + 1 if config.include_last_prompt_query else max(1, ended)
    rows = min(len(capture.rows), usable)
    attention = mx.stack(capture.rows[:rows])
    if ranks is not None:
        attention = ranks.highest(attention)
    importance = checked(np.array(attention.mean(axis=0)))
    words = f"{rows} look-ahead rows, maximum over the heads of {capture.layers[0]} layers"
    lookahead = tuple(generated[: ended + 1][: config.rows])
    return Scores(importance, "draft", words, lookahead, rows, task.cache)
