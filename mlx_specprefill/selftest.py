"""A self-test: tiny random models compute on this device what the library relies on, against the CPU in float32.

The reference takes another way than the tested code, so that it is meaningful without a GPU, too: a forward without a
cache, or one token at a time.
"""

from __future__ import annotations

import importlib
import json
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, get_args

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_map
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from .adapters.mtp import ARCHITECTURES, MTPLayers
from .cache.positioned import make_positioned_cache, place
from .config import EngineConfig, SpeculationConfig, SpeculationName
from .engine.engine import Engine
from .events import Event, Failed, Finished, TokenEvent
from .loading.one_model import read_model
from .pair import load_pair
from .request import GenerationRequest, SpecPrefillOptions, TokenIds
from .selection.heads import DraftHeads, Head
from .speculative.strategies import STRATEGIES

Dtype = Literal["float32", "bfloat16", "float16"]
Floats = npt.NDArray[np.floating[Any]]

VOCAB, M = 64, 72  # the vocabulary of selftest.json; more tokens than its ropes were trained on
# Every token is followed by another, so that words of the prompt always draft something.
PROMPT = np.resize(np.random.default_rng(5).permutation(np.arange(2, VOCAB, dtype=np.int32)), M)
_DEPTH = 2  # layers, the last of which sees the whole prompt

_OWN = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_SHARED = _OWN.pop("shared")
# Metal has kernels for these head sizes. All experts are chosen, because rounding would swap the last ones.
FAMILIES: dict[str, dict[str, Any]] = {name: {**_SHARED, **own} for name, own in _OWN.items()}

# About three times the errors of MLX's CPU backend.
_LIMITS: dict[Dtype, float] = {"float32": 1e-5, "bfloat16": 0.025, "float16": 0.005}
_PACKED = 0.01  # more, where keys and values have 8 bits
_PATIENCE_S = 30  # for an answer that takes milliseconds
_ANSWER, _LOGPROBS = 6, 20
_FEW_ROWS: SpeculationName = "ngram"  # the strategy whose forwards of a few tokens stand for all in half precision
_CONFIG = EngineConfig(
    prefill_step=32,
    prefix_cache_bytes=0,
    speculation=SpeculationConfig(budget=64, chunk=4, sinks=4, window=16, ngram_match=1),
)


def save_checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """Write a folder that `load_pair` reads."""
    folder.mkdir()
    mx.random.seed(1)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(_uneven, model.parameters()))
    weights = {}
    if config["model_type"] in ARCHITECTURES:
        head = tree_map(_uneven, MTPLayers(model.language_model.args).parameters())
        weights = {f"mtp.{name}": array for name, array in tree_flatten(head)}
    if "quantization" in config:
        nn.quantize(model, **config["quantization"])
    weights |= dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w0"))
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=words, unk_token="w0", eos_token="w1").save_pretrained(folder)
    return folder


def _uneven(array: mx.array) -> mx.array:
    """Scale weights so that attention is not flat. A constant, like a new norm's weight, would hide its factor."""
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    return array * 1.5 if array.ndim > 1 else array + 0.1 * mx.random.normal(array.shape)


def _heads(config: dict[str, Any]) -> DraftHeads:
    """Return two heads of the last of the first layers; in recurrent models only that layer has attention."""
    recurrent = "mamba_num_heads" in config or "linear_num_key_heads" in config
    heads = tuple(Head(0 if recurrent else _DEPTH - 1, number, 1.0) for number in (0, 1))
    return DraftHeads(heads, _DEPTH, config["num_hidden_layers"], {})


class Case:
    """A tiny model in one dtype, loaded from its checkpoint as `serve` does, and its reference.

    Nothing is calibrated: no forward of a draft runs on the thread that loads it.

    Attributes:
        pair: with the model itself as a draft, loaded once more.
    """

    def __init__(self, name: str, folder: Path, dtype: Dtype) -> None:
        self.name, self.dtype = name, dtype
        self.pair = load_pair(folder, folder, heads=_heads(FAMILIES[name]), exit_early=False, dtype=dtype)
        with _cpu():
            self._exact, _, _ = read_model(folder, dtype, lambda done, total: None)
            self._exact.set_dtype(mx.float32)
            mx.eval(self._exact.parameters())
        self._known: dict[bytes, Floats] = {}

    def after_all(self, answer: TokenIds) -> Floats:
        """Return the logits (L, V) of an answer's tokens to the whole prompt, from one forward without a cache."""
        with _cpu():
            return floats(self._exact(mx.array(np.append(PROMPT, answer))[None])[0, M - 1 : -1])

    def after(self, kept: TokenIds, answer: TokenIds) -> Floats:
        """Return the same after the prompt's tokens `kept`, each fed alone at its position."""
        key = kept.tobytes() + answer.tobytes()
        if key not in self._known:
            with _cpu():
                cache = make_positioned_cache(self._exact)
                first = _read_singly(self._exact, cache, kept)
                self._known[key] = self._behind(cache, first, answer)
        return self._known[key]

    def _behind(self, cache: list[Any], first: mx.array, answer: TokenIds) -> Floats:
        """Feed an answer's tokens behind a cache; return the logits of each, the first of which are known."""
        tokens = answer[:-1].tolist()
        return floats(mx.stack([first, *(self._exact(mx.array([[token]]), cache=cache)[0, -1] for token in tokens)]))


@contextmanager
def _cpu() -> Iterator[None]:
    """Run on the CPU without compilation, which on a Mac needs a C++ compiler."""
    mx.disable_compile()
    try:
        with mx.stream(mx.cpu):
            yield
    finally:
        mx.enable_compile()


def _read_singly(model: Any, cache: list[Any], kept: TokenIds) -> mx.array:
    """Feed the prompt's tokens one at a time, so that RoPE gets an integer; return the last one's logits (V,)."""
    for position in kept:
        place(cache, np.array([position]))
        logits: mx.array = model(mx.array(PROMPT[None, position : position + 1]), cache=cache)[0, -1]
        mx.eval(logits, [part.state for part in cache])
    return logits


def floats(array: mx.array) -> Floats:
    """Return the array's numbers in float32."""
    return np.array(array.astype(mx.float32))


@dataclass(frozen=True, slots=True)
class Check:
    """One operation of one tiny model in one dtype.

    Attributes:
        model: a family.
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
    """Yield every check of the default device when it is done: some hundred in a minute.

    Needs no network and no model.
    """
    with TemporaryDirectory() as folder:
        for number, (name, config) in enumerate(FAMILIES.items()):
            checkpoint = save_checkpoint(Path(folder) / str(number), config)
            for dtype in get_args(Dtype):
                missing = _unsupported(config, dtype)
                if missing is not None:
                    yield Check(name, dtype, "all", "not supported", words=missing)
                    continue
                try:
                    yield from _operations(Case(name, checkpoint, dtype))
                except Exception as raised:  # noqa: BLE001 - as in `_run_check`
                    yield _failed_check(name, dtype, "loading and starting", raised)


def _unsupported(config: dict[str, Any], dtype: Dtype) -> str | None:
    """Return why this device can't run a model: MLX's CPU backend gathers unpacked experts in float32 only."""
    if mx.default_device() != mx.Device(mx.cpu) or "experts" not in str(config) or "quantization" in config:
        return None
    ones = mx.ones((1, 8, 8), getattr(mx, dtype))
    try:
        mx.eval(mx.gather_mm(ones, ones, rhs_indices=mx.array([0])))
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


def _run_check(model: str, dtype: Dtype, operation: str, limit: float, measure: Callable[[], float]) -> Check:
    try:
        error = measure()
    except Exception as raised:  # noqa: BLE001 - any exception is a result
        return _failed_check(model, dtype, operation, raised)
    return Check(model, dtype, operation, "ok" if error <= limit else "failed", error, limit)


def _failed_check(model: str, dtype: Dtype, operation: str, error: Exception) -> Check:
    return Check(model, dtype, operation, "failed", words=f"{type(error).__name__}: {error}")


def _operations(case: Case) -> Iterator[Check]:
    """Check every way to an answer in float32. In half precision other kernels run, but the same code leads to them."""
    # A GPU may multiply float32 with the 10 bits of TF32 (MLX on an M5), which float16 has too.
    exact = mx.default_device() == mx.Device(mx.cpu)
    limit = _LIMITS["float16" if case.dtype == "float32" and not exact else case.dtype]

    def check(operation: str, measure: Callable[..., float], *given: Any, limit: float = limit) -> Check:
        return _run_check(case.name, case.dtype, operation, limit, partial(measure, case, *given))

    full, sparse = _Request(sparse=False), _Request(sparse=True)
    with Engine(case.pair, _CONFIG) as engine:
        yield check("full prefill", _answer_error, engine, full)
        yield check("sparse prefill", _answer_error, engine, sparse)
        yield check("answers beside each other", _answer_error, engine, sparse, full)
        for name in STRATEGIES if case.dtype == "float32" else (_FEW_ROWS,):
            if name != "mtp" or case.pair.model_type in ARCHITECTURES:
                yield check(f"drafted by {name}", _answer_error, engine, _Request(True, name))
    if "sliding_window" not in FAMILIES[case.name]:
        with Engine(case.pair, replace(_CONFIG, kv_bits=8)) as engine:
            yield check("quantised KV cache", _answer_error, engine, full, limit=limit + _PACKED)


def _distance(ours: Floats, truth: Floats) -> float:
    """Return the norm of the difference relative to the truth's; not finite where something is not finite."""
    return float(np.linalg.norm(ours - truth) / np.linalg.norm(truth))


class _Request(NamedTuple):
    sparse: bool
    strategy: SpeculationName | None = None


def _answer_error(case: Case, engine: Engine, *requests: _Request) -> float:
    """Return the largest error of answers to concurrent requests.

    Raises:
        queue.Empty: no answer within a minute.
    """
    inboxes: list[queue.SimpleQueue[Event]] = [queue.SimpleQueue() for _ in requests]
    for request, inbox in zip(requests, inboxes, strict=True):
        options = SpecPrefillOptions(enabled=request.sparse, return_spans=True, speculative=request.strategy)
        engine.submit(GenerationRequest(PROMPT, _ANSWER, specprefill=options, logprobs=_LOGPROBS), inbox.put)
    # All answers are awaited before a reference is computed: that makes the CPU the default device of all threads.
    answers = [_await_answer(inbox) for inbox in inboxes]
    return max(_error(case, engine, request, answer) for request, answer in zip(requests, answers, strict=True))


def _await_answer(inbox: queue.SimpleQueue[Event]) -> list[Event]:
    events = [inbox.get(timeout=_PATIENCE_S)]
    while not isinstance(events[-1], (Finished, Failed)):
        events.append(inbox.get(timeout=_PATIENCE_S))
    return events


def _error(case: Case, engine: Engine, request: _Request, answer: list[Event]) -> float:
    """Return the error of the likeliest tokens' log-probabilities.

    Raises:
        RuntimeError: the answer was not made as requested, or has a token that is not the likeliest.
    """
    events, last = [event for event in answer if isinstance(event, TokenEvent)], answer[-1]
    if isinstance(last, Failed):
        raise last.error
    assert isinstance(last, Finished)
    report, speculation = last.report, last.report.speculation
    if report.mode != ("sparse" if request.sparse else "full"):
        raise RuntimeError(report.reason)
    if request.strategy is not None and (speculation is None or speculation.strategy != request.strategy):
        raise RuntimeError("the answer was not drafted" if speculation is None else speculation.reason)
    if any(event.logprob != event.top_logprobs[0].logprob for event in events):
        raise RuntimeError("a greedy answer has a token that is not the likeliest")
    logits = _truth(case, engine, last, np.array([event.token for event in events], dtype=np.int32))
    ranked = np.array([[best.token for best in event.top_logprobs] for event in events])
    ours = np.array([[best.logprob for best in event.top_logprobs] for event in events])
    truth = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return _distance(ours, np.take_along_axis(truth, ranked, axis=-1))


def _truth(case: Case, engine: Engine, last: Finished, answer: TokenIds) -> Floats:
    if last.report.mode == "full":
        return case.after_all(answer)
    kept = np.concatenate([np.arange(*span, dtype=np.int32) for span in last.report.kept_spans or ()])
    return case.after(kept, answer)


def sync_ms() -> float:
    """Return the milliseconds from queueing a small operation to its result, a median."""
    times = []
    for _ in range(200):
        begun = time.perf_counter()
        mx.eval(mx.zeros(8) + 1)
        times.append(1e3 * (time.perf_counter() - begun))
    return median(times)
