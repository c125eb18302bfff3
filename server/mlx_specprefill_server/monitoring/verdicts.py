"""Sentences about a verdict: on an answer and each argument of its calls, its log line, and counts per API key.

Used on the event loop.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from mlx_specprefill import CacheLabel, GenerationRequest, TokenIds, Verdict

from ..deltas import CallDelta, CallStart
from ..generation.reader import Mark
from .answers import NewestAnswers

logger = logging.getLogger(__name__)

LOOKED_AT = 8  # newest answers that a prompt is compared with
OPEN = "pending"


class AnswerVerdict:
    """The verdict on one answer, before and after it is known. Used on the event loop.

    Args:
        index: of the answer among those of its request.
    """

    def __init__(self, request_id: str | None, index: int, model: str, request: GenerationRequest) -> None:
        self.request_id = request_id
        self._label = request.label
        self._length = len(request.prompt)
        self._digest = _digest(request.prompt)
        ended = {"request_id": request_id, "ended": round(time.time(), 3)}
        self._fields: dict[str, Any] = ended | {"model": model, "index": index, "verdict": OPEN}

    @property
    def word(self) -> str:
        """The verdict, or "pending"."""
        return str(self._fields["verdict"])

    def tell(self, verdict: Verdict, marks: Sequence[Mark], decode: Callable[[list[int]], str]) -> None:
        """Note the verdict, and write one line to the log.

        Args:
            marks: places of tool calls in the answer.
        """
        self._fields |= {"verdict": verdict.word} | _numbers(verdict)
        if verdict.word != "unknown":
            self._fields |= {"first": _first(verdict, decode), "calls": list(_calls(verdict, marks))}
        names = ("request_id", "model", "index", "verdict", "reason", "tokens", "agreeing")
        shown = {name: self._fields[name] for name in names if name in self._fields}
        logger.info("verdict %s", verdict.word, extra={"fields": shown})

    def is_before(self, label: CacheLabel, prompt: TokenIds) -> bool:
        """Return whether the prompt goes on from the answered one."""
        return self._label == label and self._length < len(prompt) and self._digest == _digest(prompt[: self._length])

    def to_dict(self) -> dict[str, Any]:
        return dict(self._fields)


class Verdicts(NewestAnswers[AnswerVerdict]):
    """The last answers' verdicts by API key, and counts of all since the start."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def count(self, identity: str, word: str) -> None:
        self._counts[identity][word] += 1

    def counts(self, identity: str | None) -> dict[str, int]:
        """Return the verdicts since the start, and how many of the last answers have none yet."""
        shown = self._counts.values() if identity is None else [self._counts.get(identity, Counter())]
        total = sum(shown, Counter[str]())
        waiting = sum(answer.word == OPEN for answer in self.newest_first(identity))
        return {word: total[word] for word in ("same", "differs", "unknown")} | {OPEN: waiting}

    def previous(self, identity: str, request: GenerationRequest) -> dict[str, Any] | None:
        """Return the verdict on the latest answer of the conversation that a request continues."""
        newest = self.newest_first(identity)[:LOOKED_AT]
        answer = next((candidate for candidate in newest if candidate.is_before(request.label, request.prompt)), None)
        return None if answer is None else answer.to_dict()


def _digest(prompt: TokenIds) -> bytes:
    return hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()


def _numbers(verdict: Verdict) -> dict[str, Any]:
    if verdict.word == "unknown":
        return {"reason": verdict.why_unknown}
    low, high = verdict.interval
    numbers: dict[str, Any] = {
        "sampled": verdict.is_sampled,
        "tokens": int(verdict.tokens.size),
        "counted": int(verdict.counted.sum()),
        "agreeing": int((verdict.counted & verdict.agrees).sum()),
        "nll_full": round(verdict.nll_full, 4),
        "nll_sparse": round(verdict.nll_sparse, 4),
    }
    if verdict.is_sampled:
        bounds = [round(bound, 4) for bound in (low, high)] if math.isfinite(low) else None
        numbers |= {"log_ratio": round(verdict.nll_sparse - verdict.nll_full, 4), "interval": bounds}
    return numbers


def _first(verdict: Verdict, decode: Callable[[list[int]], str]) -> dict[str, Any] | None:
    """Return the first token on which full reading disagrees, and the one that it would have chosen."""
    i = verdict.first
    if i is None:
        return None
    return {
        "token_index": i,
        "text_offset": len(decode(verdict.tokens[:i].tolist())),
        "chosen": {"token_id": int(verdict.tokens[i]), "probability": _probability(verdict.full[i])},
        "full": {"token_id": int(verdict.own[i]), "probability": _probability(verdict.own_full[i])},
    }


def _probability(logprob: float) -> float:
    return round(math.exp(logprob), 4)


def _calls(verdict: Verdict, marks: Sequence[Mark]) -> Iterator[dict[str, Any]]:
    """Yield, for each tool call, the verdict on its name and on each argument in order."""
    starts = [i for i, mark in enumerate(marks) if isinstance(mark.delta, CallStart)]
    for i, end in pairwise([*starts, len(marks)]):
        parts = [mark for mark in marks[i + 1 : end] if isinstance(mark.delta, CallDelta)]
        arguments = [_word(verdict, _tokens_of(parts, span)) for span in _arguments(parts)]
        yield {"name": _word(verdict, range(marks[i].start, marks[i].end)), "arguments": arguments}


def _word(verdict: Verdict, tokens: Sequence[int]) -> str:
    places = [token for token in tokens if token < verdict.tokens.size and verdict.counted[token]]
    if not places:
        return "unknown"
    return "same" if verdict.agrees[places].all() else "differs"


def _arguments(parts: Sequence[Mark]) -> list[tuple[int, int]]:
    """Return the characters [start, end) of each argument, name and value, in a call's JSON object."""
    text = "".join(mark.delta.text for mark in parts if isinstance(mark.delta, CallDelta))
    read, spans, at = json.JSONDecoder().raw_decode, list[tuple[int, int]](), text.find("{") + 1
    while (start := text.find('"', at)) >= 0:
        try:
            _, colon = read(text, start)
            value = text.index(":", colon) + 1
            _, at = read(text, value + len(text[value:]) - len(text[value:].lstrip()))
        except ValueError:  # the answer ended inside the call
            return [*spans, (start, len(text))]
        spans.append((start, at))
    return spans


def _tokens_of(parts: Sequence[Mark], span: tuple[int, int]) -> list[int]:
    """Return the tokens that wrote these characters of a call's arguments."""
    tokens, at = list[int](), 0
    for mark in parts:
        assert isinstance(mark.delta, CallDelta)
        begin, at = at, at + len(mark.delta.text)
        if begin < span[1] and at > span[0]:
            tokens += range(mark.start, mark.end)
    return tokens
