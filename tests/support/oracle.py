"""The masked dense oracle: what a sparse prefill must equal, computed without any of the code under test.

Truth is the same model run over the *whole* prompt with mlx-lm's own caches and its own `mx.fast.rope`, in which a
dropped token can be seen by nobody else:

- every attention mask also hides the keys of dropped tokens. A dropped row keeps its own key: a row that sees nothing
  would be NaN, and NaN leaks through 0 * NaN;
- windows are windows over original positions, because nothing was removed from the sequence;
- a token that is fed in a later turn is hidden from those of earlier turns, wherever it stands;
- in the layers that have a ring, recalled tokens are hidden from all but those of their own recall, and see no others;
- recurrent modules do not mask but *skip* dropped tokens (gather, run, scatter): a convolution would otherwise see
  zeros where the sparse run sees the kept neighbour. They are given the others in the order of feeding.

Then the continuation is fed token by token, dense.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

from mlx_specprefill.adapters.capture import QueryCapture
from mlx_specprefill.adapters.depth import FirstLayers
from mlx_specprefill.adapters.patches import install_patches
from mlx_specprefill.cache.positioned import PositionedKVCache, leaves, make_positioned_cache, place
from tests.support import precision
from tests.support.refusals import (
    ABSOLUTE,
    BATCH_REFUSALS,
    DEPTH_DIFFERS,
    DRAFT_REFUSALS,
    SPARSE_REFUSALS,
    SPECULATION_REFUSALS,
)
from tests.support.tiny_configs import tiny_models

install_patches()  # as after a pair was loaded; `build` adds the patches of the model's own file

PROMPT_LEN = 96
DECODED = 16
CHUNKS = (7, 1, 9, 5)  # tokens per sparse forward, in turn

# Never run: importing olmo ends the process unless a package that nothing depends on is installed, and the only
# weights of prism_hadamard_qwen35 are packed ones.
UNBUILDABLE = frozenset({"olmo", "prism_hadamard_qwen35"})
METAL_ONLY = frozenset({"bitnet", "muse_spark"})

# Modules that hold a recurrent state; all other state in mlx-lm is keys and values.
RECURRENT = frozenset(
    {
        "BailingKDA",
        "ConvKVGatedMixer",
        "FalconH1Mixer",
        "GatedDeltaNet",
        "GraniteMoeHybridMamba2Mixer",
        "JambaMambaMixer",
        "KimiDeltaAttention",
        "KimiK3DeltaAttention",
        "LinearAttention",
        "Mamba",
        "NemotronHMamba2Mixer",
        "Qwen3NextGatedDeltaNet",
        "RecurrentBlock",
        "ShortConv",
    }
)

Logits = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int32]


@contextmanager
def on_the_cpu_unfused() -> Iterator[None]:
    """Run on the CPU without fused kernels. Bit-identity is promised on the CPU only.

    On a fresh machine mlx compiles each fused kernel for a second. There are a hundred here, and none of them knows
    about positions.
    """
    mx.disable_compile()
    try:
        with mx.stream(mx.cpu):
            yield
    finally:
        mx.enable_compile()


# --- tiny models -----------------------------------------------------------------------------------------------------


def runnable() -> list[str]:
    """The configurations that run on MLX's CPU backend."""
    return [name for name, tiny in tiny_models().items() if tiny.architecture not in UNBUILDABLE | METAL_ONLY]


def build(name: str, dtype: mx.Dtype | None = None, seed: int = 0, times: int = 1) -> nn.Module:
    """The tiny model with random weights, ready for sparse prefill; parameters that start constant are perturbed.

    Args:
        times: that many times as many layers.
    """
    mx.random.seed(seed)
    model = _construct(name, times)
    model.update(tree_map(perturbed, model.parameters()))
    model = precision.cast(model, dtype)
    model.eval()
    mx.eval(model.parameters())
    install_patches()
    return model


def _construct(name: str, times: int = 1) -> nn.Module:
    tiny = tiny_models()[name]
    module = importlib.import_module(f"mlx_lm.models.{tiny.architecture}")
    config = json.loads(json.dumps(tiny.config))
    text = config.get("text_config", config)
    if times > 1:
        count = text["num_hidden_layers"]
        text |= {key: times * value for key, value in text.items() if isinstance(value, list) and len(value) == count}
        text["num_hidden_layers"] = times * count
    return module.Model(module.ModelArgs.from_dict(config))


def can_recall_into(name: str) -> bool:
    """Return whether a sparse cache of the model can take tokens out of order."""
    return any(isinstance(part, PositionedKVCache) for part in leaves(make_positioned_cache(_construct(name))))


def has_experts(name: str) -> bool:
    """Return whether the model gathers experts, which mlx's CPU back-end can multiply in float32 only."""
    return precision.gathers(_construct(name))


def perturbed(parameter: mx.array) -> mx.array:
    """Norms of one, zero biases, zero sinks: a constant would hide what it multiplies."""
    if not mx.issubdtype(parameter.dtype, mx.floating) or parameter.size < 2:
        return parameter
    if parameter.max().item() > parameter.min().item():
        return parameter
    return parameter + 0.1 * mx.random.normal(parameter.shape).astype(parameter.dtype)


def vocabulary(model: nn.Module) -> int:
    """Token ids below this exist in the model."""
    logits = model(mx.array([[0, 1]]), cache=make_prompt_cache(model))
    return int(logits.shape[-1])


# --- the case --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A prompt (M,), the indices of its kept tokens (N,) ending in M - 1, and the tokens that follow it.

    `turns` (M,) says in which turn each token is fed; None: all in one. `recalls` are those turns that recall.
    """

    prompt: Indices
    kept: Indices
    continuation: Indices
    turns: Indices | None = None
    recalls: tuple[int, ...] = ()

    @property
    def fed(self) -> Indices:
        """The indices of the kept tokens in the order of feeding, (N,)."""
        return self.kept if self.turns is None else self.kept[np.argsort(self.turns[self.kept], kind="stable")]


def make_case(vocab: int, keep: float = 0.4, length: int = PROMPT_LEN, decoded: int = DECODED, seed: int = 0) -> Case:
    """Single tokens and runs, with gaps shorter and longer than a window."""
    rng = np.random.default_rng(seed)
    score = np.repeat(rng.random(length // 4 + 1), 4)[:length] + 0.5 * rng.random(length)
    best = np.argsort(-score)[: max(1, round(keep * length) - 1)]
    kept = np.union1d(best, [length - 1]).astype(np.int32)
    prompt = rng.integers(0, vocab, length).astype(np.int32)
    return Case(prompt, kept, rng.integers(0, vocab, decoded).astype(np.int32))


# --- the oracle ------------------------------------------------------------------------------------------------------


def masked_dense(model: nn.Module, case: Case, kv_bits: int | None = None) -> Logits:
    """Logits of the last prompt token and of every continuation token, (1 + T, V).

    Args:
        kv_bits: mlx-lm's quantised caches take the place of the plain ones once the prompt is read.
    """
    return _MaskedDense(model, case, kv_bits).run()


Made = dict[int, tuple[mx.array, mx.array]]  # rotated keys and values (1, H, N, D), by the number of a cache


def replaced_dense(model: nn.Module, case: Case, estimated: Indices, made: Made) -> Logits:
    """As `masked_dense`, but other keys and values stand in for those of some dropped tokens.

    Args:
        estimated: indices of these tokens, (N,).
    """
    run = _MaskedDense(model, case)
    run.kept[estimated] = True
    for number, leaf in enumerate(_leaves(run.caches)):
        if number in made:
            leaf.update_and_fetch = _replacing(leaf.update_and_fetch, case.prompt.size, estimated, made[number])
    return run.run()


def _replacing(
    update: Callable[..., Any], length: int, rows: Indices, made: tuple[mx.array, mx.array]
) -> Callable[..., Any]:
    def replace(*arrays: mx.array) -> Any:
        if arrays[0].shape[2] == length:
            for array, others in zip(arrays, made, strict=True):
                array[..., mx.array(rows), :] = others
        return update(*arrays)

    return replace


class _MaskedDense:
    """One dense run; positions equal indices here, as nothing is ever removed."""

    def __init__(self, model: nn.Module, case: Case, kv_bits: int | None = None) -> None:
        self.model = model
        self.case = case
        self.kv_bits = kv_bits
        self.caches = make_prompt_cache(model)
        self.kept = np.zeros(case.prompt.size + case.continuation.size, dtype=bool)
        self.kept[case.kept] = True
        self.kept[case.prompt.size :] = True
        self.turns = np.full(self.kept.size, np.iinfo(np.int32).max)
        self.turns[: case.prompt.size] = 0 if case.turns is None else case.turns
        recalled = self.kept & np.isin(self.turns, case.recalls)
        self.recall = np.where(recalled, self.turns, -1)  # of each token; -1: it is none of a recall
        self.coming = np.arange(0)  # positions of the current forward's tokens
        self.rings: dict[int, RotatingKVCache] = {}  # mlx-lm's own rings, filled with positions, by size
        self.ring_order: dict[int, npt.NDArray[np.int64]] = {}
        self.rotations = 0
        for leaf in _leaves(self.caches):
            if isinstance(leaf, (KVCache, RotatingKVCache)):
                leaf.make_mask = self._mask_maker(leaf)
            if isinstance(leaf, RotatingKVCache):
                self.rings[leaf.max_size] = RotatingKVCache(leaf.max_size)

    def run(self) -> Logits:
        rows, start = [], 0
        with self._stock_primitives(), self._skipping_recurrence():
            for tokens in [self.case.prompt, *self.case.continuation[:, None]]:
                self._advance(start, tokens.size)
                logits = self.model(mx.array(tokens)[None], cache=self.caches)[0, -1]
                mx.eval(logits, [leaf.state for leaf in _leaves(self.caches)])
                rows.append(np.array(logits.astype(mx.float32)))
                start += tokens.size
                if self.kv_bits is not None and start == self.case.prompt.size:
                    self.caches = [self._quantised(part) for part in self.caches]
        return np.stack(rows)

    def _quantised(self, part: Any) -> Any:
        if not isinstance(part, KVCache):
            return part
        group = 64 if part.keys.shape[-1] % 64 == part.values.shape[-1] % 64 == 0 else 32
        quantised = part.to_quantized(group_size=group, bits=self.kv_bits)
        quantised.make_mask = self._mask_maker(quantised)
        return quantised

    def _advance(self, start: int, count: int) -> None:
        self.coming = np.arange(start, start + count)
        positions = mx.array(self.coming.astype(np.float32)).reshape(1, 1, count, 1)
        for size, ring in self.rings.items():
            stored, _ = ring.update_and_fetch(positions, positions)
            self.ring_order[size] = np.array(stored).reshape(-1).astype(np.int64)

    def _mask_maker(self, leaf: Any) -> Callable[..., mx.array]:
        ring_size = leaf.max_size if isinstance(leaf, RotatingKVCache) else None

        def make_mask(N: int, window_size: int | None = None, return_array: bool = False) -> mx.array:
            keys = self._all_keys() if ring_size is None else self.ring_order[ring_size]
            mask = self._visible(keys, window_size or ring_size)
            if ring_size is not None:
                mask = mask & self._of_one_recall(keys)
            return mask if N > 1 else mask[None, None]

        return make_mask

    def _of_one_recall(self, keys: npt.NDArray[np.int64]) -> mx.array:
        """Return which ring entries a row may see, bool (L, S): tokens of its own recall, or those of none."""
        return mx.array(self.recall[self.coming][:, None] == self.recall[keys][None])

    def _all_keys(self) -> npt.NDArray[np.int64]:
        return np.arange(self.coming[-1] + 1)

    def _visible(self, keys: npt.NDArray[np.int64], window: int | None) -> mx.array:
        """Causal, inside the window, and the row's own or kept and fed by then; (L, S)."""
        distance = self.coming[:, None] - keys[None]
        there = self.kept[keys][None] & (self.turns[keys][None] <= self.turns[self.coming][:, None])
        visible = (distance >= 0) & (there | (distance == 0))
        return mx.array(visible if window is None else visible & (distance < window))

    @contextmanager
    def _stock_primitives(self) -> Iterator[None]:
        """mlx's own rotation, and attention that hides dropped keys even where a model brings its own mask."""
        installed = mx.fast.rope, mx.fast.scaled_dot_product_attention
        stock_rope, self.attention = _stock(installed[0]), _stock(installed[1])
        mx.fast.rope, mx.fast.scaled_dot_product_attention = self._counting(stock_rope), self._attend
        try:
            yield
        finally:
            mx.fast.rope, mx.fast.scaled_dot_product_attention = installed

    def _counting(self, rope: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def rotate(x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            self.rotations += 1
            if self.coming.size > 1 and x.shape[-2] == self.case.kept.size:  # inside a gathered recurrent module
                fed = mx.array(self.case.fed)
                whole = mx.zeros((*x.shape[:-2], self.coming.size, x.shape[-1]), x.dtype)
                whole[..., fed, :] = x
                return rope(whole, *args, **kwargs)[..., fed, :]
            return rope(x, *args, **kwargs)

        return rotate

    def _attend(self, q: mx.array, k: mx.array, v: mx.array, **kwargs: Any) -> mx.array:
        keys = self._keys_of(k.shape[-2])
        if keys is not None:
            mask, hidden = kwargs.get("mask"), self._visible(keys, None)
            if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
                hidden = mx.where(hidden, mask, mx.finfo(mask.dtype).min)
            elif isinstance(mask, mx.array):
                hidden = hidden & mask
            kwargs["mask"] = hidden
        return self.attention(q, k, v, **kwargs)

    def _keys_of(self, count: int) -> npt.NDArray[np.int64] | None:
        """The positions of the keys of one attention call; None where the model gathered them by its own mask."""
        if count == self.coming[-1] + 1:
            return self._all_keys()
        return next((order for order in self.ring_order.values() if order.size == count), None)

    @contextmanager
    def _skipping_recurrence(self) -> Iterator[None]:
        classes = {type(m) for m in self.model.modules() if type(m).__name__ in RECURRENT}
        originals = {kind: kind.__call__ for kind in classes}
        for kind, call in originals.items():
            kind.__call__ = self._skipping(call)
        try:
            yield
        finally:
            for kind, call in originals.items():
                kind.__call__ = call

    def _skipping(self, call: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def skip(module: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
            inputs = args[0] if args else kwargs[_input_name(kwargs)]
            if inputs.shape[1] == 1:
                return call(module, *args, **kwargs)
            fed = mx.array(self.case.fed)
            if args:
                out = call(module, inputs[:, fed], *args[1:], **kwargs)
            else:
                out = call(module, **{**kwargs, _input_name(kwargs): inputs[:, fed]})
            whole = mx.zeros((1, inputs.shape[1], *out.shape[2:]), out.dtype)
            whole[:, fed] = out
            return whole

        return skip


def _input_name(kwargs: dict[str, Any]) -> str:
    return next(name for name in ("x", "hidden_states", "input_states") if name in kwargs)


def _stock(primitive: Any) -> Any:
    """The function of mlx inside whatever was put around it."""
    while not isinstance(primitive, type(mx.fast.rms_norm)):
        primitive = primitive.__wrapped__
    return primitive


def _leaves(caches: Sequence[Any]) -> Iterator[Any]:
    for part in caches:
        if isinstance(part, CacheList):
            yield from _leaves(part.caches)
        else:
            yield part


# --- the runs that are compared with it ------------------------------------------------------------------------------


def feed(
    model: nn.Module,
    caches: list[Any],
    tokens: Indices,
    continuation: Indices,
    positions: Indices | None = None,
    chunks: Sequence[int] = CHUNKS,
) -> Logits:
    """Prefill in chunks, the last token alone, then the continuation; logits (1 + T, V). No positions: mlx-lm's own."""
    turn = start = 0
    while start < tokens.size:
        size = 1 if start == tokens.size - 1 else min(chunks[turn % len(chunks)], tokens.size - 1 - start)
        if positions is not None:
            place(caches, positions[start : start + size])
        logits = model(mx.array(tokens[start : start + size])[None], cache=caches)
        mx.eval(logits, [part.state for part in caches])
        start, turn = start + size, turn + 1
    rows = [logits[0, -1]]
    for token in continuation.tolist():
        rows.append(model(mx.array([[token]]), cache=caches)[0, -1])
        mx.eval(rows[-1], [part.state for part in caches])
    return np.stack([np.array(row.astype(mx.float32)) for row in rows])


def sparse(model: nn.Module, case: Case) -> Logits:
    """The library's sparse prefill and decoding."""
    return feed(model, make_positioned_cache(model), case.prompt[case.kept], case.continuation, case.kept)


def naive(model: nn.Module, case: Case) -> Logits:
    """The same tokens at contiguous positions: what a sparse prefill must not be."""
    return feed(model, make_prompt_cache(model), case.prompt[case.kept], case.continuation)


def relative_error(got: Logits, truth: Logits) -> float:
    """Largest difference relative to the largest logit; infinite if the two are not finite in the same places."""
    finite = np.isfinite(truth)
    if not (finite.any() and np.array_equal(finite, np.isfinite(got))):
        return float("inf")
    return float(np.abs(got[finite] - truth[finite]).max() / np.abs(truth[finite]).max())


def keep_all_is_identical(model: nn.Module, case: Case) -> bool:
    """Bit for bit: positioned caches with every token kept, and mlx-lm's caches, fed in the same chunks."""
    everything = np.arange(case.prompt.size, dtype=np.int32)
    chunks = (31, 17, 1)
    stock = make_prompt_cache(model)
    plain = feed(model, stock, case.prompt, case.continuation, chunks=chunks)
    positioned = make_positioned_cache(model)
    placed = feed(model, positioned, case.prompt, case.continuation, everything, chunks)
    same = zip(cache_arrays(stock), cache_arrays(positioned), strict=True)
    return np.array_equal(plain, placed) and all(np.array_equal(a, b) for a, b in same)


def cache_arrays(caches: Sequence[Any]) -> list[mx.array]:
    """Every array of a prompt cache in a fixed order, positions left out."""
    arrays = []
    for leaf in _leaves(caches):
        state = (leaf.inner if hasattr(leaf, "inner") else leaf).state
        arrays += [value for _, value in tree_flatten(list(state)) if isinstance(value, mx.array)]
    return arrays


def captured_layers(model: nn.Module, prompt: Indices) -> int:
    """Attention calls whose rows over the whole prompt a query capture got from the last prompt token; 0 if none."""
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array(prompt[:-1])[None], cache=caches))
    capture = QueryCapture(int(prompt.size), 1)
    with capture.row(int(prompt.size)):
        model(mx.array(prompt[-1:])[None], cache=caches)
    return capture.layers[0] if capture.layers else 0


# --- the first layers alone -------------------------------------------------------------------------------------------


class _Seen:
    """The arrays of attention calls, recorded until a forward enters a layer for the first time.

    `entered[n]` is the hidden state that layer n was given in the current forward, and how many calls came before.
    """

    def __init__(self) -> None:
        self.attention: list[list[mx.array]] = []
        self.entered: dict[int, tuple[mx.array, int]] = {}


@contextmanager
def _watched(model: nn.Module) -> Iterator[_Seen]:
    """A layer is entered when it or any of its parts is called."""
    seen = _Seen()
    parts: dict[int, int] = {}
    for n, layer in enumerate(model.layers):
        for part in layer.modules():
            parts.setdefault(id(part), n)
    kinds = {type(part) for layer in model.layers for part in layer.modules() if "__call__" in vars(type(part))}
    calls = {kind: kind.__call__ for kind in kinds}
    attention, softmax = mx.fast.scaled_dot_product_attention, mx.softmax

    def entering(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            n = parts.get(id(module))
            if n is not None and n not in seen.entered:
                given = next(value for value in (*args, *kwargs.values()) if isinstance(value, mx.array))
                seen.entered[n] = given, len(seen.attention)
            return call(module, *args, **kwargs)

        return run

    def attending(q: mx.array, k: mx.array, v: mx.array, **kwargs: Any) -> mx.array:
        seen.attention.append([q, k, *(value for value in kwargs.values() if isinstance(value, mx.array))])
        return attention(q, k, v, **kwargs)

    def normalising(logits: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        seen.attention.append([logits])
        return softmax(logits, *args, **kwargs)

    mx.fast.scaled_dot_product_attention, mx.softmax = attending, normalising
    for kind, call in calls.items():
        kind.__call__ = entering(call)
    try:
        yield seen
    finally:
        mx.fast.scaled_dot_product_attention, mx.softmax = attention, softmax
        for kind, call in calls.items():
            kind.__call__ = call


@dataclass(frozen=True)
class Depth:
    """The first `count` layers of a model. `differs`: what is not bit for bit as in the whole model; None: nothing.

    `captured` is as in `captured_layers`, of these layers alone; `spans` is what the library makes of their caches.
    """

    count: int
    differs: str | None
    captured: int
    spans: bool


def depths(model: nn.Module, prompt: Indices, chunks: Sequence[int] = (31, 17, 1)) -> list[Depth]:
    """Every number of first layers but all of them, against the whole model, which runs in turn with them.

    Compared are the hidden state that the next layer is given, every array that attention was called with before, and
    the caches.
    """
    shallow = [FirstLayers(model, count) for count in range(1, len(model.layers))]
    caches, whole = [make_prompt_cache(first) for first in shallow], make_prompt_cache(model)
    differs: dict[int, str] = {}
    start = turn = 0
    while start < prompt.size:
        tokens = mx.array(prompt[start : start + chunks[turn % len(chunks)]])[None]
        with _watched(model) as truth:
            mx.eval(model(tokens, cache=whole))
        for first, held in zip(shallow, caches, strict=True):
            with _watched(model) as seen:
                hidden = first(tokens, cache=held)
            state, calls = truth.entered[first.count]
            if not _same([state], [hidden]):
                differs.setdefault(first.count, f"the hidden state, from token {start} on")
            before = chain.from_iterable(truth.attention[:calls])
            if not _same([*before], [*chain.from_iterable(seen.attention)]) or first.count in seen.entered:
                differs.setdefault(first.count, f"attention, from token {start} on")
        start, turn = start + tokens.shape[1], turn + 1
    for first, held in zip(shallow, caches, strict=True):
        ours = cache_arrays(held)
        if not ours or not _same(cache_arrays(whole)[: len(ours)], ours):
            differs.setdefault(first.count, "caches")
    return [
        Depth(first.count, differs.get(first.count), captured_layers(first, prompt), first.spans_prompt)
        for first in shallow
    ]


def _same(ours: Sequence[mx.array], theirs: Sequence[mx.array]) -> bool:
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype and bool(mx.array_equal(a, b, equal_nan=a.dtype != mx.bool_).item())
        for a, b in zip(ours, theirs, strict=True)
    )


# --- one measurement per tiny model, shared by the tests and the table ------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """The errors of one tiny model. `failure` is why it could not run sparsely; the numbers then are None."""

    failure: str | None
    error: float | None = None
    naive_error: float | None = None
    rotates: bool = False
    identical: bool = False
    captured: int = 0
    attention: str = ""


@cache
def measure(name: str) -> Measurement:
    """Run one tiny model through the oracle and through the library."""
    try:
        model = build(name)
        case = make_case(vocabulary(model))
        attention, captured = _attention(model), captured_layers(model, case.prompt)
    except Exception as error:  # noqa: BLE001 - a model that can't run here at all
        return Measurement(f"{type(error).__name__}: {error}")
    try:
        fast = sparse(model, case)
        oracle = _MaskedDense(model, case)
        truth = oracle.run()
    except Exception as error:  # noqa: BLE001 - what it raises is its reason
        return Measurement(f"{type(error).__name__}: {error}", captured=captured, attention=attention)
    return Measurement(
        None,
        relative_error(fast, truth),
        relative_error(naive(model, case), truth),
        oracle.rotations > 0,
        keep_all_is_identical(model, case),
        captured,
        attention,
    )


@cache
def measure_depths(name: str) -> list[Depth]:
    """Return the depths of one tiny model, none if it can't run at all."""
    if measure(name).attention == "":
        return []
    model = build(name)
    return depths(model, make_case(vocabulary(model), length=50).prompt)


def _attention(model: nn.Module) -> str:
    """The kinds of state that its layers keep."""
    kinds = {type(leaf) for leaf in _leaves(make_prompt_cache(model))}
    names = {KVCache: "full", RotatingKVCache: "window", ArraysCache: "recurrent"}
    return " + ".join(label for kind, label in names.items() if kind in kinds) or "own cache"


# --- the table of `adapters/verified.json` ---------------------------------------------------------------------------

EXACT = 1e-4  # relative to the largest logit, float32


def architectures() -> list[str]:
    """Every file of mlx_lm/models that defines a decoder, by looking at the installed package."""
    folder = Path(mlx_lm.__file__).parent / "models"
    sources = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    return sorted(name for name, text in sources.items() if "class Model(" in text or "import Model " in text)


def variants(architecture: str) -> list[str]:
    return [tiny.name for tiny in tiny_models().values() if tiny.architecture == architecture]


def table_row(architecture: str) -> dict[str, Any]:
    """Return the row that `verified.json` must have for an architecture. The worst of its variants counts."""
    measured = [measure(name) for name in variants(architecture)] if architecture not in UNBUILDABLE else []
    compared = [m.error for m in measured if m.error is not None and m.attention != "recurrent"]
    errors = [error for error in compared if np.isfinite(error)]
    captures = bool(measured) and all(m.captured > 0 for m in measured) and architecture not in DRAFT_REFUSALS
    shallow = [depth for name in variants(architecture) for depth in measure_depths(name)] if captures else []
    exact = bool(measured) and all(m.failure is None and m.identical and m.error < EXACT for m in measured)
    deep = bool(shallow) and all(depth.differs is None and depth.captured for depth in shallow if depth.spans)
    refusals = {
        "sparse": SPARSE_REFUSALS.get(architecture) or (None if exact else "it differs from the masked dense run"),
        "draft": None if captures else DRAFT_REFUSALS[architecture],
        "depth": None if deep else DRAFT_REFUSALS.get(architecture, DEPTH_DIFFERS),
        "batch": BATCH_REFUSALS.get(architecture),
        "speculation": SPECULATION_REFUSALS.get(architecture),
    }
    return {
        "refusals": {kind: reason for kind, reason in refusals.items() if reason is not None},
        "absolute": architecture in ABSOLUTE,
        "error": float(f"{max(errors):.0e}") if errors else None,
        "mlx_lm": mlx_lm.__version__,
    }
