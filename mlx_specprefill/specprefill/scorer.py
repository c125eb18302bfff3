"""Importance of every prompt token: what all scorers have in common.

A scorer lets the draft read the prompt and says how much each token matters. There are two, each in a file of its own:
`paper` (SpecPrefill, section 3.2) and `heads` (a few calibrated heads, the default where a draft has been calibrated).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..cache.positioned import leaves
from ..config import ScoringConfig
from ..errors import SpecPrefillError
from ..request import Progress, PromptSpan, ScorerKind

__all__ = ["Scorer", "Scores", "ToScore", "Undo", "asked_before", "checked", "question_span", "read_prompt"]

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class ToScore:
    """A prompt for a scorer.

    Attributes:
        prompt: M token ids.
        question: [start, end) of the tokens that ask (`question_span`).
        template: (M,) true for the tokens of template and question, which are no matter of choice; None: none.
        stop_ids: tokens that end the draft's answer.
        cache: the draft's own mlx-lm cache, which may hold a dense prefix of the prompt up to the question at most.
            Afterwards it holds exactly the prompt.
        step: asked for the tokens of each forward.
        again: tokens that ask although what they ask about comes after them, int32 (Q,): they are read once more behind
            the prompt, and their attention counts instead of the question's. Only calibrated heads are read so.
        seen: gets what the draft returns of the tokens from an index on, at every forward; None: nobody wants it.
    """

    prompt: npt.NDArray[np.int32]
    question: tuple[int, int]
    template: Bools | None
    stop_ids: frozenset[int]
    cache: list[Any]
    step: Callable[[], int]
    again: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    seen: Callable[[int, mx.array], None] | None = None

    @classmethod
    def alone(cls, draft: nn.Module, prompt: Any, config: ScoringConfig, **given: Any) -> ToScore:
        """A prompt without messages, from its first token on."""
        ids = np.asarray(prompt, dtype=np.int32)
        defaults: dict[str, Any] = {
            "question": question_span(ids.size, config),
            "template": None,
            "stop_ids": frozenset(),
            "step": lambda: config.prefill_step,
        }
        if "cache" not in given:
            given["cache"] = list(make_prompt_cache(draft))
        return cls(ids, **(defaults | given))


@dataclass(frozen=True, slots=True)
class Scores:
    """What a scorer found.

    Attributes:
        importance: float32 (M,), non-negative.
        scorer: who it was.
        words: by which rule and on what, for a report.
        lookahead: the draft's greedy continuation, as far as it was used; empty where the scorer needs none.
        rows: query rows averaged.
        cache: the draft's, holding exactly the prompt.
        read: tokens of the prompt that the draft read for it, its own ones; the rest it had cached.
    """

    importance: npt.NDArray[np.float32]
    scorer: ScorerKind = "request"
    words: str = "the request's own scores"
    lookahead: tuple[int, ...] = ()
    rows: int = 0
    cache: list[Any] = field(default_factory=list)
    read: int = 0


class Scorer(Protocol):
    """Lets a draft read a prompt."""

    def score(self, draft: nn.Module, task: ToScore) -> Generator[Progress, None, Scores]:
        """Yields between draft forwards, returns the scores.

        Raises:
            SparseUnsupportedError: no attention layer sees the whole prompt.
            SpecPrefillError: the scores are not finite.
        """
        ...


def question_span(
    prompt_len: int, config: ScoringConfig, end: int | None = None, units: npt.NDArray[np.int32] | None = None
) -> tuple[int, int]:
    """Indices [start, end) of the tokens that ask, at least one.

    Args:
        end: of the last message; the prompt's if not given.
        units: where lines and sentences begin. The last one before `end` asks, within the limits of
            `ScoringConfig.question_rows`; without units, as many tokens as the lower limit says.
    """
    least, most = config.question_rows
    end = prompt_len if end is None else max(1, min(end, prompt_len))
    rows = least
    if units is not None and (before := units[units < end]).size:
        rows = min(max(end - int(before[-1]), least), most)
    return max(0, end - rows), end


def asked_before(
    spans: Sequence[PromptSpan], config: ScoringConfig, units: npt.NDArray[np.int32]
) -> tuple[tuple[int, int], ...]:
    """Where what asks stands in a prompt that ends with tool results: [start, end), in the order to read them in.

    That is the model's last call with what it said before it, and the last line or sentence of the last user message
    with header and end marker each. Nothing where a message of another kind ends the prompt: that one asks.
    """
    users = [span for span in spans if span.kind == "user"]
    if not users or spans[-1].kind != "tool":
        return ()
    user = users[-1]
    called = next((span for span in reversed(spans) if span.kind == "assistant" and span.start > user.start), None)
    places = []
    if called is not None:
        said = max(called.content_start, called.content_end - config.question_rows[1])
        places += [(called.start, called.content_start), (said, called.end)]
    asked = max(user.content_start, question_span(user.content_end, config, units=units)[0])
    places += [(user.start, user.content_start), (asked, user.end)]
    return tuple((start, end) for start, end in places if start < end)


def read_prompt(
    draft: nn.Module,
    task: ToScore,
    end: int,
    passage: tuple[int, int] | None = None,
    capturing: Callable[[int, int, slice], AbstractContextManager[None]] | None = None,
) -> Generator[Progress, None, None]:
    """Feed the prompt up to `end` to the draft.

    Args:
        passage: [start, end) of tokens that are read in one forward, whose attention is captured.
        capturing: a context for that forward; gets the tokens in the cache after it, its own length, and where the
            passage lies in it.
    """
    tokens, M = mx.array(task.prompt)[None], task.prompt.size
    start = max((int(part.offset) for part in leaves(task.cache) if hasattr(part, "offset")), default=0)
    first = end if passage is None else passage[0]
    while start < end:
        stop = min(start + task.step(), end)
        if start < first < stop < end:
            stop = first  # the passage is read whole, together with what follows it
        elif first <= start:
            stop = end
        captured: AbstractContextManager[None] = nullcontext()
        if passage is not None and capturing is not None and passage[0] < stop:
            captured = capturing(stop, stop - start, slice(max(passage[0] - start, 0), passage[1] - start))
        with captured:
            returned = draft(tokens[:, start:stop], cache=task.cache)
        if task.seen is not None:
            task.seen(start, returned)
        mx.eval([part.state for part in task.cache])
        yield Progress("draft", stop, M)
        start = stop


class Undo:
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


def checked(importance: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The same, if it is finite.

    Raises:
        SpecPrefillError: it is not.
    """
    if not np.isfinite(importance).all():
        raise SpecPrefillError("the draft's attention is not finite")
    return importance
