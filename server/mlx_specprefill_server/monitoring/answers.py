"""The running requests, and the last answers of each API key with the verdicts on them. Never any text."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import merge
from itertools import islice, pairwise
from operator import itemgetter
from typing import Any, Generic, TypeVar

from mlx_specprefill import CacheLabel, Event, Finished, GenerationRequest, Progress, TokenEvent, TokenIds, Verdict

from ..deltas import CallDelta, CallStart
from ..generation.generation import AnswerResult
from ..generation.reader import Mark

T = TypeVar("T")

logger = logging.getLogger(__name__)

HELD = 50  # answers per API key
LOOKED_AT = 8  # newest answers that a prompt is compared with
OPEN = "pending"


class RunningRequest:
    """One request from its submission to its end. Several answers to it count as one. Used on the event loop.

    Attributes:
        identity: name of the API key's identity.
    """

    def __init__(self, request_id: str | None, identity: str, prompt_tokens: int) -> None:
        self.identity = identity
        self.begun = time.time()
        self._request_id = request_id
        self._prompt_tokens = prompt_tokens
        # each stage with its start, in seconds since the epoch
        self._stages: list[tuple[str, float]] = [("queued", self.begun)]
        self._done = self._total = self._made = 0
        self._cached: int | None = None

    def update(self, event: Event) -> None:
        """Update the progress from an event of the engine."""
        match event:
            case Progress():
                self._enter(event.stage)
                self._done, self._total = event.done, event.total
                self._cached = self._cached if event.cached is None else event.cached
            case TokenEvent():
                self._enter("decode")
                self._made += 1
                self._done = self._total = 0

    def _enter(self, stage: str) -> None:
        if stage != self._stages[-1][0] and stage != "queued":
            self._stages.append((stage, time.time()))

    def to_dict(self) -> dict[str, Any]:
        """Return the entry for the statistics. `done` of `total` tokens of the stage are 0 of 0 while unknown."""
        return {
            "request_id": self._request_id,
            "prompt_tokens": self._prompt_tokens,
            "cached_tokens": self._cached,
            "stages": [{"stage": stage, "since": round(since, 3)} for stage, since in self._stages],
            "done": self._done,
            "total": self._total,
            "completion_tokens": self._made,
        }


class NewestAnswers(Generic[T]):
    """The last answers of each API key. Used on the event loop."""

    def __init__(self) -> None:
        # One queue per API key. A common one would reveal other keys' traffic by the time an answer stays in it.
        self._answers: defaultdict[str, deque[tuple[float, T]]] = defaultdict(partial(deque, maxlen=HELD))
        self._forgotten: dict[str | None, float] = {}  # times by API key, None: all keys

    def add(self, identity: str, answer: T, made: float) -> None:
        """Add an answer that ends now to those of an API key, given by its identity's name.

        Args:
            made: when its request came (`GenerationRequest.made`). One from before `forget` is left out.
        """
        if made > max(self._forgotten.get(name, -math.inf) for name in (None, identity)):
            self._answers[identity].appendleft((time.time(), answer))

    def forget(self, identity: str | None) -> None:
        """Drop the answers to all that one API key has asked by now, or all keys have."""
        self._forgotten[identity] = time.monotonic()
        for name in list(self._answers) if identity is None else [identity]:
            self._answers.pop(name, None)

    def newest_first(self, identity: str | None) -> list[T]:
        """Return the answers to one API key, or to all keys if it is None."""
        shown = self._answers.values() if identity is None else [self._answers.get(identity, deque())]
        newest = merge(*shown, key=itemgetter(0), reverse=True)
        return [answer for _, answer in islice(newest, HELD)]


def recent_answer(result: AnswerResult, request_id: str | None) -> dict[str, Any]:
    """Return an answer's entry in the statistics."""
    report = result.event.report
    return {
        "request_id": request_id,
        "ended": round(time.time(), 3),
        "finish": result.reason,
        "completion_tokens": result.event.completion_tokens if isinstance(result.event, Finished) else 0,
        "specprefill": None if report is None else report.to_dict(),
    }


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
