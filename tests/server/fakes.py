"""A stand-in for the engine with its interface and its threading, and a tokenizer in which one byte is one token."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_specprefill import (
    CacheEntry,
    ChunkInfo,
    Constraint,
    EngineClosedError,
    EngineHealth,
    EngineStats,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Inspection,
    InvalidRequestError,
    Logprob,
    MemoryUse,
    Prediction,
    PrefillReport,
    Progress,
    PromptLogprobs,
    Ranks,
    RequestCancelled,
    Timings,
    TokenEvent,
    TokenIds,
    Verdict,
)
from mlx_specprefill.engine.estimating import EstimatesState

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<bos>", "<s>", "</s>", "[INST]", "[/INST]", "<|start|>",
    "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>", "<think>", "</think>",
)  # fmt: skip


def byte_tokenizer(
    template: str | None = CHATML, eos: str = "<|im_end|>", specials: Sequence[str] = SPECIALS
) -> TokenizerWrapper:
    """256 byte tokens in byte order of the alphabet, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos)
    fast.add_special_tokens({"additional_special_tokens": [token for token in specials if token != eos]})
    fast.chat_template = template
    return TokenizerWrapper(fast)


@dataclass
class FakePair:
    tokenizer: Any = field(default_factory=byte_tokenizer)
    context_length: int = 4096
    target_id: str = "demo/target"
    draft_id: str | None = "demo/draft"
    mapping: Any = None
    sparse_refusal: str | None = None
    ranks: Ranks | None = None
    sharding: str | None = None
    scores_itself: bool = False
    dtype: str = "float32"
    turn_end: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


class FakeHandle:
    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.expecting = False

    def cancel(self) -> None:
        self.cancelled.set()

    def expect_more(self) -> None:
        self.expecting = True


# One step of an answer: a token, an event as it is, a wait, or a failure.
Step = int | Event | threading.Event | Exception
Script = Callable[[GenerationRequest], Iterable[Step]]


class FakeEngine:
    """One thread, one request at a time, scripted answers. Cancellation is seen between two steps, or while waiting."""

    def __init__(self, pair: FakePair | None = None) -> None:
        self.pair = pair or FakePair()
        self.script: Script = lambda request: self.tokens("Hello")
        self.requests: list[GenerationRequest] = []
        self.handles: list[FakeHandle] = []  # one for each request
        self.reasons: list[str] = []  # of the ends, in order
        self.alive = True
        self.verifies = False
        self.is_measured = False
        self.estimates = EstimatesState("none", "it is scripted")
        self.verdict = Verdict()  # on every answer
        self.room: int | None = None  # tokens, where memory has room for fewer than the model could read
        self.kept = [CacheEntry(f"{i:032x}", "target", 100 * i, 1000 * i, i, 1.7e9) for i in (1, 2)]
        self.inspected: Inspection | Exception | threading.Event | None = None  # None: every other chunk is kept
        self.heartbeat_age_s = 0.0
        self.full = False
        self.lost: str | None = None
        self._running = self._waiting = 0
        self._jobs: queue.Queue[Any] = queue.Queue()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    @property
    def window(self) -> int:
        return self.room or self.pair.context_length

    def tokens(self, text: str, end: bool = True) -> list[Step]:
        """An answer as tokens, with the end-of-turn token if it ends by itself."""
        ids = self.pair.tokenizer.encode(text, add_special_tokens=False)
        return [*ids, self.pair.tokenizer.eos_token_id] if end else list(ids)

    def says(self, text: str, end: bool = True) -> None:
        self.script = lambda request: self.tokens(text, end)

    def compile(self, constraint: Constraint) -> None:
        """Refuses what contains "?!"."""
        if "?!" in constraint.grammar:
            raise InvalidRequestError(f"{constraint.field}: no such grammar", constraint.field)

    def submit(
        self,
        request: GenerationRequest,
        on_event: Callable[[Event], None],
        on_verdict: Callable[[Verdict], None] = lambda _: None,
    ) -> FakeHandle:
        if self.full:
            raise EngineClosedError("2 requests are waiting already")
        handle = FakeHandle()
        self.requests.append(request)
        self.handles.append(handle)
        self._waiting += 1
        self._jobs.put((request, on_event, on_verdict, handle))
        return handle

    def submit_inspection(
        self,
        request: GenerationRequest,
        on_event: Callable[[Event], None],
        on_end: Callable[[Inspection | Exception], None],
    ) -> FakeHandle:
        handle = FakeHandle()
        self.requests.append(request)
        self.handles.append(handle)
        threading.Thread(target=self._inspect, args=(request, handle, on_end), daemon=True).start()
        return handle

    def _inspect(
        self, request: GenerationRequest, handle: FakeHandle, on_end: Callable[[Inspection | Exception], None]
    ) -> None:
        result = self.inspected
        if isinstance(result, threading.Event):
            while not result.wait(0.005) and not handle.cancelled.is_set():
                pass
            result = None
        if handle.cancelled.is_set():
            result = RequestCancelled()
        on_end(inspection(request) if result is None else result)

    def cached(self, owner: str | None = None) -> tuple[CacheEntry, ...]:
        return tuple(self.kept)

    def drop_cached(self, name: str | None = None, owner: str | None = None) -> bool:
        left = [] if name is None else [entry for entry in self.kept if entry.id != name]
        found = name is None or len(left) < len(self.kept)
        self.kept = left
        return found

    def health(self) -> EngineHealth:
        return EngineHealth(self.alive, self.heartbeat_age_s, self._running, self._waiting, self.lost)

    def stats(self) -> EngineStats:
        return EngineStats(
            waiting=self._waiting,
            prefilling=0,
            decoding=self._running,
            max_rows=4,
            max_queue=8,
            fallbacks={"draft": 1},
            densified=2,
            densified_tokens=300,
            prefix_hits=3,
            prefix_misses=4,
            prefix_tokens=500,
            evictions=6,
            disk_evictions=7,
            memory=MemoryUse(
                target_weights=1000,
                draft_weights=100,
                requests=60,
                reserved=70,
                prefix_cache=20,
                prefix_disk=5,
                active=1200,
                spare=300,
                limit=2500,
            ),
        )

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(5)
        self.alive = False

    def idle(self, within: float = 60.0) -> bool:
        """Return whether nothing runs or waits, now or within that many seconds."""
        until = time.monotonic() + within
        while time.monotonic() < until and (self._running or self._waiting):
            time.sleep(0.005)
        return not self._running and not self._waiting

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            request, on_event, on_verdict, handle = job
            self._running += 1  # first: in between it must not look idle
            self._waiting -= 1
            last = self._run(request, on_event, handle)
            self.reasons.append(last.reason if isinstance(last, Finished) else "failed")
            self._running -= 1
            on_event(last)
            if _is_verified(request):
                on_verdict(self.verdict)

    def _run(self, request: GenerationRequest, on_event: Callable[[Event], None], handle: FakeHandle) -> Event:
        on_event(Progress("queued", 0, len(request.prompt)))
        if request.prompt_logprobs is not None:
            on_event(_scored(request.prompt, request.prompt_logprobs))
        made = 0
        for step in self.script(request):
            if isinstance(step, threading.Event):
                while not step.wait(0.005) and not handle.cancelled.is_set():
                    pass
            if handle.cancelled.is_set():
                return Finished("cancelled", made, report_of(request))
            if isinstance(step, Exception):
                return Failed(step)
            if isinstance(step, int):
                if made == request.max_tokens:
                    break
                made += 1
                on_event(_token(step, 0 if _is_verified(request) else request.logprobs))
                if step in request.stop_token_ids:
                    return Finished("stop", made, report_of(request))
            elif not isinstance(step, threading.Event):
                on_event(step)
        return Finished("length", made, report_of(request))


def inspection(request: GenerationRequest) -> Inspection:
    """Chunks of 32; the even ones are kept, the first of them by rule."""
    M, size = len(request.prompt), 32
    chunks = tuple(
        ChunkInfo(
            i, start, min(start + size, M), 1e-3 / (1 + i), i == 0, i % 2 == 0, min(size, M - start) * (1 - i % 2)
        )
        for i, start in enumerate(range(0, M, size))
    )
    kept = tuple((chunk.start, chunk.end) for chunk in chunks if chunk.kept)
    return Inspection(
        mode="sparse",
        reason="requested",
        prompt_tokens=M,
        kept_tokens=sum(end - start for start, end in kept),
        importance=np.zeros(M, np.float32),
        chunks=chunks,
        forced_ranges=((0, min(size, M), "first chunk"),),
        kept_spans=kept,
        asking=((max(0, M - 4), M),),
        predicted=Prediction(2000.0, 500.0),
    )


def report_of(request: GenerationRequest) -> PrefillReport:
    sparse = bool(request.specprefill.enabled)
    kept = len(request.prompt) // 2 if sparse else len(request.prompt)
    return PrefillReport(
        mode="sparse" if sparse else "full",
        reason="asked for" if sparse else "short prompt",
        prompt_tokens=len(request.prompt),
        kept_tokens=kept,
        cached_tokens=1,
        kept_share=0.5 if sparse else None,
        timings=Timings(draft_ms=1, select_ms=2, prefill_ms=3, ttft_ms=7, decode_ms=4),
        kept_spans=((0, kept),) if request.specprefill.return_spans else None,
    )


def _is_verified(request: GenerationRequest) -> bool:
    return request.specprefill.verify and bool(request.specprefill.enabled)


def _token(token: int, count: int | None) -> TokenEvent:
    if count is None:
        return TokenEvent(token)
    return TokenEvent(token, -0.25, _alternatives(token, count))


def _alternatives(token: int, count: int) -> tuple[Logprob, ...]:
    return tuple(Logprob((token + i) % 256, -0.25 - i) for i in range(count))


def comparable(request: GenerationRequest) -> dict[str, Any]:
    """Its fields but for its time, to be compared with another one's: arrays have no truth value."""
    same = {field.name: getattr(request, field.name) for field in fields(request) if field.name != "made"}
    return same | {"prompt": request.prompt.tolist()}


def _scored(prompt: TokenIds, count: int) -> PromptLogprobs:
    return PromptLogprobs(tuple((Logprob(token, -0.5), _alternatives(token, count)) for token in prompt[1:].tolist()))


def says_and_waits(engine: FakeEngine, text: str) -> threading.Event:
    """Makes answers that say so much and never end by themselves; the event tells that all is said."""
    said = threading.Event()

    def script(request: GenerationRequest) -> Iterable[Step]:
        yield from engine.tokens(text, end=False)
        said.set()
        yield threading.Event()

    engine.script = script
    return said
