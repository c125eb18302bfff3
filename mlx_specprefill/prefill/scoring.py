"""Importance of every prompt token, from the draft's attention (SpecPrefill, section 3.2; algorithms in docs).

The draft reads the prompt, then a few tokens ahead. Each captured query row gives one pooled attention row per layer
and head; what they attend to is the mean over rows of the maximum (the paper's rule) or mean over layers and heads,
whichever kept more of what answers need in the draft's family (decision 19). Part of the importance is that of the
look-ahead, part that of the question's last tokens, which ask for things that an answer comes to later (decision 21).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..adapters.capture import QueryCapture
from ..adapters.depth import FirstLayers
from ..adapters.registry import adapter_for, architecture_of
from ..cache.positioned import leaves
from ..config import ScoringConfig
from ..errors import SparseUnsupportedError, SpecPrefillError
from ..request import Progress

__all__ = ["Scores", "question_span", "score_prompt"]


@dataclass(frozen=True, slots=True)
class Scores:
    """What the draft found.

    Attributes:
        importance: float32 (M,), non-negative.
        lookahead: the draft's greedy continuation, as far as it was used.
        rows: look-ahead rows averaged; fewer than configured when the draft ended its answer.
        layers: attention layers that contributed to each row.
        cache: the draft's, holding exactly the prompt.
    """

    importance: npt.NDArray[np.float32]
    lookahead: tuple[int, ...]
    rows: int
    layers: int
    cache: list[Any] = field(default_factory=list)


def score_prompt(
    draft: nn.Module,
    prompt: Sequence[int],
    config: ScoringConfig,
    stop_ids: frozenset[int] = frozenset(),
    cache: list[Any] | None = None,
    step: Callable[[], int] | None = None,
    question: tuple[int, int] | None = None,
    frame: npt.NDArray[np.bool_] | None = None,
) -> Generator[Progress, None, Scores]:
    """Score a prompt; yields between draft forwards, returns `Scores`.

    Args:
        prompt: M token ids.
        stop_ids: tokens that end the draft's look-ahead; rows after one are not used.
        cache: the draft's own mlx-lm cache if it already holds a dense prefix of the prompt, up to the question at
            most. Afterwards it holds exactly the prompt.
        step: asked for the tokens of each forward instead of `config.prefill_step`.
        question: [start, end) of the tokens that ask; by default the last ones but one of the prompt.
        frame: (M,) tokens that are no matter of choice (`frame_mask`). They get no importance, and none of theirs is
            smoothed over the tokens beside them (decision 25).

    Raises:
        SparseUnsupportedError: no attention layer sees the whole prompt.
        SpecPrefillError: the scores are not finite.
    """
    M = len(prompt)
    tokens = mx.array(list(prompt))[None]
    cache = make_prompt_cache(draft) if cache is None else cache
    counted = None if frame is None else mx.array(~frame)
    capture = QueryCapture(M, config.pool_width, config.heads or adapter_for(architecture_of(draft)).heads, counted)
    asks, asked = question_span(M, config) if question is None else question
    start = max((int(part.offset) for part in leaves(cache) if hasattr(part, "offset")), default=0)
    while start < M - 1:
        end = min(start + (step() if step is not None else config.prefill_step), M - 1)
        if start < asks < end < M - 1:
            end = asks  # the question is read whole, together with what follows it
        elif asks <= start:
            end = M - 1
        if asks < end and start < asked:
            with capture.of_passage(end, end - start, slice(max(asks - start, 0), asked - start)):
                draft(tokens[:, start:end], cache=cache)
        else:
            draft(tokens[:, start:end], cache=cache)
        mx.eval([part.state for part in cache], [] if capture.passage is None else capture.passage)
        yield Progress("draft", end, M)
        start = end
    if isinstance(draft, FirstLayers):
        looked_ahead = _last_row(draft, tokens[:, -1:], capture, cache)
    else:
        looked_ahead = _look_ahead(draft, tokens[:, -1:], capture, cache, config)
    yield Progress("draft", M, M)
    return replace(_scores(capture, looked_ahead, config, stop_ids), cache=cache)


def question_span(
    prompt_len: int, config: ScoringConfig, end: int | None = None, units: npt.NDArray[np.int32] | None = None
) -> tuple[int, int]:
    """Indices [start, end) of the tokens that ask, never the prompt's last token; both are M - 1 if there are none.

    Args:
        end: of the last message; M - 1 if not given.
        units: where lines and sentences begin. The last one before `end` asks, within the limits of
            `ScoringConfig.question_rows`; without units, as many tokens as the lower limit says.
    """
    least, most = config.question_rows
    end = prompt_len - 1 if end is None else min(end, prompt_len - 1)
    rows = least
    if units is not None and (before := units[units < end]).size:
        rows = min(max(end - int(before[-1]), least), most)
    start = max(0, end - rows)
    return (start, end) if start < end else (prompt_len - 1, prompt_len - 1)


def _look_ahead(
    draft: nn.Module, last: mx.array, capture: QueryCapture, cache: list[Any], config: ScoringConfig
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
    undo = _Undo(cache)
    fed = config.rows - len(capture.rows) if config.include_last_prompt_query else config.rows
    generated = [mx.argmax(logits[:, -1, :], axis=-1)]
    for step in range(1, fed + 1):
        with capture.row(M + step):
            logits = draft(generated[-1][None], cache=cache)
        generated.append(mx.argmax(logits[:, -1, :], axis=-1))
        mx.async_eval(generated[-1], capture.rows)  # type: ignore[no-untyped-call]
    undo.restore(fed)
    looked_ahead = mx.concatenate(generated)
    mx.eval(looked_ahead, capture.rows, [part.state for part in cache])
    return looked_ahead


def _last_row(draft: FirstLayers, last: mx.array, capture: QueryCapture, cache: list[Any]) -> mx.array:
    """Feed the last prompt token to layers that can't say what comes next: its own row, and no token."""
    with capture.row(capture.prompt_len):
        draft(last, cache=cache)
    mx.eval(capture.rows, [part.state for part in cache])
    return mx.array([], dtype=mx.uint32)


class _Undo:
    """Returns a cache to the end of the prompt: plain KV by trimming, everything else from a copy of its state.

    The copies share memory with the originals until those are written to.
    """

    def __init__(self, cache: list[Any]) -> None:
        self._parts = list(leaves(cache))
        self._states = [None if type(part) is KVCache else copy.deepcopy(part.state) for part in self._parts]

    def restore(self, fed: int) -> None:
        for part, state in zip(self._parts, self._states, strict=True):
            if state is None:
                part.trim(fed)
            else:
                part.state = state


def _scores(capture: QueryCapture, looked_ahead: mx.array, config: ScoringConfig, stop_ids: frozenset[int]) -> Scores:
    if not capture.rows:
        raise SparseUnsupportedError("no attention layer of the draft sees the whole prompt")
    generated = [int(token) for token in np.array(looked_ahead)]
    ended = next((i for i, token in enumerate(generated) if token in stop_ids), len(generated))
    # Row t reads the token before generated[t] when the last prompt token is row 0, generated[t] itself otherwise.
    usable = ended + 1 if config.include_last_prompt_query else max(1, ended)
    rows = min(len(capture.rows), usable)
    importance = np.array(mx.stack(capture.rows[:rows]).mean(axis=0))
    question = None if capture.passage is None else np.array(capture.passage)
    if question is not None and question.any():  # nothing counts in a prompt that is all frame
        part = np.float32(config.question_share)
        importance = (1 - part) * importance + part * question * (importance.sum() / question.sum())
    if not np.isfinite(importance).all():
        raise SpecPrefillError("the draft's attention is not finite")
    return Scores(importance, tuple(generated[: ended + 1][: config.rows]), rows, capture.layers[0])
