"""Checks the engine's answers, on its own thread, by the log-probabilities that it reports."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, get_args

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..adapters.capture import HeadCapture
from ..adapters.mtp import ARCHITECTURES
from ..config import EngineConfig, SpeculationConfig
from ..engine.engine import Engine
from ..request import Event, Failed, Finished, GenerationRequest, SpecPrefillOptions, TokenEvent
from ..speculative.strategies import STRATEGIES, StrategyName
from .cases import FAMILIES, PROMPT, Case, Dtype, Floats, M, Tokens, floats, save_checkpoint
from .samplers import sampler_errors

__all__ = ["Check", "check_device"]

# About three times the errors of MLX's CPU backend.
_LIMITS: dict[Dtype, float] = {"float32": 1e-5, "bfloat16": 0.025, "float16": 0.005}
_ROWS = 4  # times as much, for the attention of a single row
_PACKED = 0.01  # more, where keys and values have 8 bits
_PATIENCE_S = 30  # for an answer that takes milliseconds
_ANSWER, _LOGPROBS = 10, 20
_CONFIG = EngineConfig(
    prefill_step=32,
    prefix_cache_bytes=0,
    speculation=SpeculationConfig(budget=64, chunk=4, sinks=4, window=16, ngram_match=1),
)


@dataclass(frozen=True, slots=True)
class Check:
    """One operation of one tiny model in one dtype.

    Attributes:
        model: a family, or "sampler".
        state: "not supported": MLX can't do it on this device.
        error: relative to the truth; None if nothing was computed.
        limit: of `error`.
        words: the exception, or the unsupported operation.
    """

    model: str
    dtype: Dtype
    operation: str
    state: Literal["ok", "failed", "not supported"]
    error: float | None = None
    limit: float | None = None
    words: str = ""


def check_device() -> Iterator[Check]:
    """Yield every check of the default device when it is done: some 250 in a minute or two.

    Needs no network and no model.
    """
    for dtype in get_args(Dtype):
        for operation, limit, measure in sampler_errors(dtype):
            yield _checked("sampler", dtype, operation, limit, measure)
    with TemporaryDirectory() as folder:
        for number, (name, config) in enumerate(FAMILIES.items()):
            checkpoint = save_checkpoint(Path(folder) / str(number), config)
            for dtype in get_args(Dtype):
                missing = _missing(config, dtype)
                if missing is not None:
                    yield Check(name, dtype, "all", "not supported", words=missing)
                    continue
                try:
                    yield from _operations(Case(name, checkpoint, dtype))
                except Exception as raised:  # noqa: BLE001 - as in `_checked`
                    yield _raised(name, dtype, "loading and starting", raised)


def _missing(config: dict[str, Any], dtype: Dtype) -> str | None:
    """Return why this device can't run a model: MLX's CPU backend gathers unpacked experts in float32 only."""
    if mx.default_device() != mx.Device(mx.cpu) or "experts" not in str(config) or "quantization" in config:
        return None
    ones = mx.ones((1, 8, 8), getattr(mx, dtype))
    try:
        mx.eval(mx.gather_mm(ones, ones, rhs_indices=mx.array([0])))
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


def _checked(model: str, dtype: Dtype, operation: str, limit: float, measure: Callable[[], float]) -> Check:
    try:
        error = measure()
    except Exception as raised:  # noqa: BLE001 - any exception is a result
        return _raised(model, dtype, operation, raised)
    return Check(model, dtype, operation, "ok" if error <= limit else "failed", error, limit)


def _raised(model: str, dtype: Dtype, operation: str, error: Exception) -> Check:
    return Check(model, dtype, operation, "failed", words=f"{type(error).__name__}: {error}")


def _operations(case: Case) -> Iterator[Check]:
    # A GPU may multiply float32 with the 10 bits of TF32 (MLX on an M5), which float16 has too.
    exact = mx.default_device() == mx.Device(mx.cpu)
    limit = _LIMITS["float16" if case.dtype == "float32" and not exact else case.dtype]

    def check(operation: str, measure: Callable[..., float], *given: Any, limit: float = limit) -> Check:
        return _checked(case.name, case.dtype, operation, limit, partial(measure, case, *given))

    full, sparse = _Asked(sparse=False), _Asked(sparse=True)
    with Engine(case.pair, _CONFIG) as engine:
        yield check("full prefill", _answered, engine, full)
        yield check("sparse prefill", _answered, engine, sparse)
        yield check("answers beside each other", _answered, engine, sparse, full, sparse)
        for name in STRATEGIES:
            if name != "mtp" or case.pair.model_type in ARCHITECTURES:
                yield check(f"drafted by {name}", _answered, engine, _Asked(True, name))
    with Engine(case.alone, _CONFIG) as engine:
        yield check("full prefill without a draft", _answered, engine, full)
    with Engine(case.staged, _CONFIG) as engine:
        yield check("staged prefill", _answered, engine, sparse)
    if "sliding_window" not in FAMILIES[case.name]:
        with Engine(case.pair, replace(_CONFIG, kv_bits=8)) as engine:
            yield check("quantised KV cache", _answered, engine, full, limit=limit + _PACKED)
    yield check("attention rows", _rows, limit=_ROWS * limit)


def _distance(ours: Floats, truth: Floats) -> float:
    """Return the norm of the difference relative to the truth's; not finite where something is not finite."""
    return float(np.linalg.norm(ours - truth) / np.linalg.norm(truth))


def _rows(case: Case) -> float:
    """Capture the last token's attention on this thread in a forward of many tokens; return its error."""
    model, capture = case.pair.target, HeadCapture(M, None)
    cache, half = make_prompt_cache(model), M // 2
    mx.eval(model(mx.array(PROMPT[None, :half]), cache=cache))
    with capture.of_passage(M, half, slice(half - 1, half)):
        mx.eval(model(mx.array(PROMPT[None, half:]), cache=cache))
    return _distance(floats(mx.stack(list(capture.found.values())).max(axis=0)), case.last_row())


class _Asked(NamedTuple):
    sparse: bool
    strategy: StrategyName | None = None


def _answered(case: Case, engine: Engine, *asked: _Asked) -> float:
    """Return the largest error of answers to concurrent requests.

    Raises:
        queue.Empty: no answer within a minute.
    """
    inboxes: list[queue.SimpleQueue[Event]] = [queue.SimpleQueue() for _ in asked]
    for one, inbox in zip(asked, inboxes, strict=True):
        options = SpecPrefillOptions(enabled=one.sparse, return_spans=True, speculative=one.strategy)
        engine.submit(GenerationRequest(PROMPT, _ANSWER, specprefill=options, logprobs=_LOGPROBS), inbox.put)
    # All answers are awaited before a reference is computed: that makes the CPU the default device of all threads.
    answers = [_awaited(inbox) for inbox in inboxes]
    return max(_error(case, engine, one, answer) for one, answer in zip(asked, answers, strict=True))


def _awaited(inbox: queue.SimpleQueue[Event]) -> list[Event]:
    events = [inbox.get(timeout=_PATIENCE_S)]
    while not isinstance(events[-1], (Finished, Failed)):
        events.append(inbox.get(timeout=_PATIENCE_S))
    return events


def _error(case: Case, engine: Engine, asked: _Asked, answer: list[Event]) -> float:
    """Return the error of the likeliest tokens' log-probabilities.

    Raises:
        RuntimeError: the answer was not made as requested, or has a token that is not the likeliest.
    """
    events, last = [event for event in answer if isinstance(event, TokenEvent)], answer[-1]
    if isinstance(last, Failed):
        raise last.error
    assert isinstance(last, Finished)
    report, speculation = last.report, last.report.speculation
    if report.mode != ("sparse" if asked.sparse else "full"):
        raise RuntimeError(report.reason)
    if asked.strategy is not None and (speculation is None or speculation.strategy != asked.strategy):
        raise RuntimeError("the answer was not drafted" if speculation is None else speculation.reason)
    if any(event.logprob != event.top_logprobs[0].logprob for event in events):
        raise RuntimeError("a greedy answer has a token that is not the likeliest")
    logits = _truth(case, engine, last, np.array([event.token for event in events], dtype=np.int32))
    ranked = np.array([[best.token for best in event.top_logprobs] for event in events])
    ours = np.array([[best.logprob for best in event.top_logprobs] for event in events])
    truth = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return _distance(ours, np.take_along_axis(truth, ranked, axis=-1))


def _truth(case: Case, engine: Engine, last: Finished, answer: Tokens) -> Floats:
    if last.report.mode == "full":
        return case.after_all(answer)
    kept = np.concatenate([np.arange(*span, dtype=np.int32) for span in last.report.kept_spans or ()])
    return (case.after_stages if engine.pair.stages is not None else case.after)(kept, answer)
