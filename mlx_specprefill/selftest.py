"""A self-test: tiny random models compute on this device what the library relies on, against the CPU in float32.

The reference takes another way than the tested code, so that it is meaningful without a GPU, too: a forward without a
cache, one token at a time, the attention of a single row.
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
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from .adapters.capture import HeadCapture, QueryCapture
from .adapters.heads import DraftHeads, Head
from .adapters.mtp import ARCHITECTURES, MTPLayers
from .adapters.staged import StagedModel
from .cache.positioned import make_positioned_cache, place
from .config import EngineConfig, SpeculationConfig, SpeculationName
from .engine.engine import Engine
from .events import Event, Failed, Finished, TokenEvent
from .loading import load_pair
from .reading import read_model
from .request import GenerationRequest, SamplingParams, SpecPrefillOptions, TokenIds
from .sampling import choose, logits_processors, make_sampler
from .specprefill.sparse_prefill import UpperLayersModel
from .speculative.strategies import STRATEGIES
from .speculative.verification import TokenSampler

Dtype = Literal["float32", "bfloat16", "float16"]
Floats = npt.NDArray[np.floating[Any]]

VOCAB, M = 128, 96  # the vocabulary of selftest.json; more tokens than its ropes were trained on
PROMPT = np.random.default_rng(5).integers(2, VOCAB, M).astype(np.int32)
_DEPTH = 2  # layers, the last of which sees the whole prompt

_OWN = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_SHARED = _OWN.pop("shared")
# Metal has kernels for these head sizes. All experts are chosen, because rounding would swap the last ones.
FAMILIES: dict[str, dict[str, Any]] = {name: {**_SHARED, **own} for name, own in _OWN.items()}

_TEMPERATURE = 0.8
_SEEN = [3, 5, 3, 9]  # the answer so far
_DRAWS = 20_000

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
        pair: with the model itself as a draft, loaded once more. `alone`: without a draft. `staged`: with its own first
            layers as a draft.
    """

    def __init__(self, name: str, folder: Path, dtype: Dtype) -> None:
        self.name, self.dtype = name, dtype
        heads = _heads(FAMILIES[name])
        # Each loads its own: what a start leaves undone would be done by another.
        self.pair = load_pair(folder, folder, heads=heads, exit_early=False, dtype=dtype)
        self.alone = load_pair(folder, dtype=dtype)
        self.staged = load_pair(folder, "self", heads=heads, dtype=dtype)
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

    def after_stages(self, kept: TokenIds, answer: TokenIds) -> Floats:
        """Return the same after the first layers have read the whole prompt."""
        with _cpu():
            model, cache = StagedModel(self._exact, _DEPTH), make_positioned_cache(self._exact)
            lower, upper = model.split(cache)
            hidden = model.lower(mx.array(PROMPT)[None], cache=lower)[:, mx.array(kept)]
            first = _read_singly(UpperLayersModel(model.upper, hidden), upper, kept)
            model.unite(cache, kept)
            return self._behind(cache, first, answer)

    def _behind(self, cache: list[Any], first: mx.array, answer: TokenIds) -> Floats:
        """Feed an answer's tokens behind a cache; return the logits of each, the first of which are known."""
        tokens = answer[:-1].tolist()
        return floats(mx.stack([first, *(self._exact(mx.array([[token]]), cache=cache)[0, -1] for token in tokens)]))

    def last_row(self) -> Floats:
        """Return the attention (M,) of a forward of the last token: the maximum over layers and heads."""
        with _cpu():
            cache, capture = make_prompt_cache(self._exact), QueryCapture(M, 1)
            mx.eval(self._exact(mx.array(PROMPT[None, :-1]), cache=cache))
            with capture.row(M):
                mx.eval(self._exact(mx.array(PROMPT[None, -1:]), cache=cache))
            return floats(capture.rows[0])


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


def sampler_errors(dtype: Dtype) -> Iterator[tuple[str, float, Callable[[], float]]]:
    """Yield operations, limits of their errors, and functions that measure the errors, as total variations."""
    logits = (3 * mx.random.normal((1, VOCAB), key=mx.random.key(3))).astype(getattr(mx, dtype))
    for name, (params, truth) in _definitions(floats(logits)[0].astype(np.float64)).items():
        yield name, 1e-4, partial(_distribution_error, logits, params, truth)
        if name == "temperature":
            yield "drawn tokens", 0.05, partial(_draw_error, logits, params, truth)


def _distribution_error(logits: mx.array, params: SamplingParams, truth: Floats) -> float:
    """Return the error of the distribution that a request's tokens are drawn from."""
    (row,) = TokenSampler(params, VOCAB, logits_processors(params)).distributions(logits, _SEEN)
    return float(np.abs(np.asarray(row) - truth).sum() / 2)


def _draw_error(logits: mx.array, params: SamplingParams, truth: Floats) -> float:
    """Return the error of 20 000 drawn tokens; chance makes some .01."""
    tokens, _ = choose(mx.repeat(logits, _DRAWS, axis=0), None, make_sampler(params, VOCAB), [])
    return float(np.abs(np.bincount(np.array(tokens), minlength=VOCAB) / _DRAWS - truth).sum() / 2)


def _definitions(logits: Floats) -> dict[str, tuple[SamplingParams, Floats]]:
    """Return each sampler's parameters and distribution (V,)."""

    def change(tokens: Any, values: Any) -> Floats:
        given = logits.copy()
        given[tokens] = values
        weights: Floats = np.exp((given - given.max()) / _TEMPERATURE)
        return weights / np.sum(weights)

    def only(tokens: Any) -> Floats:
        kept = np.zeros_like(probs)
        kept[tokens] = probs[tokens]
        return kept / np.sum(kept)

    def first(mass: float, order: Any) -> Floats:
        return only(order[np.cumsum(probs[order]) - probs[order] < mass])

    probs = change([], [])
    order = np.argsort(-probs)
    best = int(order[0])
    seen, counts = np.unique(_SEEN, return_counts=True)
    own = logits[seen]
    made: dict[str, tuple[dict[str, Any], Floats]] = {
        "temperature": ({}, probs),
        "top-p": ({"top_p": 0.7}, first(0.7, order)),
        "top-k": ({"top_k": 5}, only(order[:5])),
        "min-p": ({"min_p": 0.2}, only(probs >= 0.2 * probs[best])),
        "repetition penalty": ({"repetition_penalty": 1.5}, change(seen, np.where(own < 0, own * 1.5, own / 1.5))),
        "presence penalty": ({"presence_penalty": 1.5}, change(seen, own - 1.5)),
        "frequency penalty": ({"frequency_penalty": 1.5}, change(seen, own - 1.5 * counts)),
        "logit bias": ({"logit_bias": {4: 5.0}}, change(4, logits[4] + 5)),
    }
    base = SamplingParams(temperature=_TEMPERATURE, seed=4)
    return {name: (replace(base, **given), defined) for name, (given, defined) in made.items()}


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
            yield _run_check("sampler", dtype, operation, limit, measure)
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
    # A GPU may multiply float32 with the 10 bits of TF32 (MLX on an M5), which float16 has too.
    exact = mx.default_device() == mx.Device(mx.cpu)
    limit = _LIMITS["float16" if case.dtype == "float32" and not exact else case.dtype]

    def check(operation: str, measure: Callable[..., float], *given: Any, limit: float = limit) -> Check:
        return _run_check(case.name, case.dtype, operation, limit, partial(measure, case, *given))

    full, sparse = _Request(sparse=False), _Request(sparse=True)
    with Engine(case.pair, _CONFIG) as engine:
        yield check("full prefill", _answer_error, engine, full)
        yield check("sparse prefill", _answer_error, engine, sparse)
        yield check("answers beside each other", _answer_error, engine, sparse, full, sparse)
        for name in STRATEGIES:
            if name != "mtp" or case.pair.model_type in ARCHITECTURES:
                yield check(f"drafted by {name}", _answer_error, engine, _Request(True, name))
    with Engine(case.alone, _CONFIG) as engine:
        yield check("full prefill without a draft", _answer_error, engine, full)
    with Engine(case.staged, _CONFIG) as engine:
        yield check("staged prefill", _answer_error, engine, sparse)
    if "sliding_window" not in FAMILIES[case.name]:
        with Engine(case.pair, replace(_CONFIG, kv_bits=8)) as engine:
            yield check("quantised KV cache", _answer_error, engine, full, limit=limit + _PACKED)
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
    return _distance(floats(mx.stack(list(capture.attention.values())).max(axis=0)), case.last_row())


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
    return (case.after_stages if engine.pair.stages is not None else case.after)(kept, answer)


def sync_ms() -> float:
    """Return the milliseconds from queueing a small operation to its result, a median."""
    return median(_times(lambda: mx.eval(mx.zeros(8) + 1), 200))


def _times(run: Callable[[], None], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begun))
    return times
