"""Fits the map from a draft's states to a target's keys and values, in closed form, on text that is made here.

Both models read rendered conversations about docstrings of the standard library, never a user's text. The map is a
ridge regression of low rank: the directions of the states that explain most of all layers' keys and values, each
scaled to unit variance. What a layer's states don't explain on other conversations stays at its mean. A map that
doesn't bring a sparse reading nearer to full reading is not used at all.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..adapters.depth import FirstLayers, full_draft_model
from ..adapters.estimates import CodedDraft, Estimates, Estimator, Known, Layers, read_estimates
from ..arrays import Floats, Positions
from ..cache.feeding import Placing, feed, forward_ends
from ..cache.positioned import leaves, make_positioned_cache, place
from ..cache.prefix.identity import model_identity
from ..choosing.sampling import log_softmax
from ..errors import LoadError, SparseUnsupportedError
from ..events import Progress
from ..pair import ModelPair
from ..request import TokenIds
from .finding_heads import CalibrationItem, calibration_items

log = logging.getLogger(__name__)

TOKENS, RANK = 24_000, 256
FIT_TOKENS = 4096  # of one conversation at most, whatever the tokenizer
_ITEM = 2600  # characters of each document; some 600 to 800 tokens
_TURNS = 2  # documents of one conversation
_HELD_OUT = 6  # conversations that the fit does not see
_RIDGE = 0.01  # of a state's variance
_ASKED = 32  # last tokens of a conversation, which are read by both
_KEPT = 0.2  # of the others, in chunks
_CHUNK = 8  # tokens
_HELPS = 0.9  # of the divergence without estimates, at most
_SEEN = 1.5  # times the largest mean square of the fit's states, beyond which a state is unlike them

Matrix = npt.NDArray[np.float64]
T = TypeVar("T")
Steps = Generator[Progress, None, T]


def conversations(tokenizer: TokenizerWrapper, seed: int) -> Iterator[TokenIds]:
    """Yield the tokens of rendered conversations, without end, the same for the same seed."""
    rng = random.Random(f"conversations/{seed}")
    items = calibration_items(1 << 20, _ITEM, seed)
    while True:
        turns = [next(items) for _ in range(_TURNS)]
        tokens = tokenizer.encode(_render(tokenizer, turns, rng), add_special_tokens=False)[:FIT_TOKENS]
        yield np.asarray(tokens, dtype=np.int32)


def _render(tokenizer: TokenizerWrapper, turns: list[CalibrationItem], rng: random.Random) -> str:
    messages = []
    for item in turns:
        content = [item.document, item.question]
        rng.shuffle(content)
        messages += [{"role": "user", "content": "\n\n".join(content)}, {"role": "assistant", "content": item.gold}]
    if not tokenizer.has_chat_template:
        return "\n\n".join(message["content"] for message in messages)
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    return text


@dataclass(eq=False)
class _Sums:
    """Adds up states (F,), centred and scaled, and by layer keys and values (K + V,), over tokens."""

    centre: Floats
    scale: Floats
    mean: Matrix  # (F,), and so on: sums until they are divided
    square: Matrix  # (F, F)
    product: dict[int, Matrix]  # (F, K + V)
    of_layer: dict[int, Matrix]  # (2, K + V): values and their squares
    count: int = 0
    largest: float = 0.0

    @classmethod
    def like(cls, states: Floats, sizes: Mapping[int, int]) -> _Sums:
        """Return empty sums, with the centre and scale of a first conversation's states (N, F)."""
        F, spread = states.shape[1], states.std(axis=0)
        scale = 1 / np.maximum(spread, 1e-3 * spread.max())
        product, of_layer = ({n: np.zeros((rows, size)) for n, size in sizes.items()} for rows in (F, 2))
        return cls(states.mean(axis=0), scale, np.zeros(F), np.zeros((F, F)), product, of_layer)

    def scaled(self, states: Floats) -> Floats:
        result: Floats = (states - self.centre) * self.scale
        return result

    def add_states(self, scaled: Floats) -> None:
        self.count += scaled.shape[0]
        self.mean += scaled.sum(axis=0, dtype=np.float64)
        self.square += scaled.T.astype(np.float64) @ scaled
        self.largest = max(self.largest, float((scaled * scaled).mean(axis=1).max()))

    def add_layer(self, layer: int, scaled: Floats, rows: mx.array) -> None:
        values = np.array(rows.astype(mx.float32)).astype(np.float64)
        self.product[layer] += scaled.T.astype(np.float64) @ values
        self.of_layer[layer] += values.sum(axis=0), (values * values).sum(axis=0)


class EstimateFit:
    """Fits a pair's map.

    Args:
        tokens: to fit on.
        rank: numbers of a code at most.
        step: returns the tokens of the next forward of "draft" or "prefill".

    Attributes:
        nbytes: of what it adds up.

    Raises:
        SparseUnsupportedError: this pair can have no map.
    """

    def __init__(
        self, pair: ModelPair, tokens: int = TOKENS, rank: int = RANK, step: Callable[[str], int] = lambda _: 512
    ) -> None:
        if (refusal := estimates_refusal(pair)) is not None or not isinstance(pair.draft, FirstLayers):
            raise SparseUnsupportedError(str(refusal))
        self._pair, self._draft = pair, pair.draft
        self._tokens, self._rank, self._step = tokens, rank, step
        self._layers = Layers(pair.target, pair.draft)
        width = pair.draft(mx.zeros((1, 2), dtype=mx.int32)).shape[-1]
        self.nbytes = 8 * width * (width + sum(self._layers.made.values()))
        self._done = 0

    def steps(self) -> Steps[Estimates | None]:
        """Yield the progress, in tokens; return the map, or None where it doesn't help."""
        sums: _Sums | None = None
        for prompt in conversations(self._pair.tokenizer, 1):
            states, held = yield from self._read(prompt)
            sums = _Sums.like(states, self._layers.made) if sums is None else sums
            scaled = sums.scaled(states)
            sums.add_states(scaled)
            for layer, rows in held.items():
                sums.add_layer(layer, scaled, rows)
                yield self._progress()
            self._done = sums.count
            if sums.count >= self._tokens:
                break
        assert sums is not None, "conversations never end"
        fitted = yield from self._solve(sums)
        others = conversations(self._pair.tokenizer, 2)
        fitted = yield from self._explained(fitted, sums, [next(others) for _ in range(_HELD_OUT)])
        ratio = yield from self._ratio(fitted, [next(others) for _ in range(_HELD_OUT)])
        log.info("estimates: the divergence from full reading is %.2f times that without them", ratio)
        return fitted if ratio <= _HELPS else None

    def _progress(self) -> Progress:
        return Progress("draft", min(self._done, self._tokens), self._tokens)

    def _read(self, prompt: TokenIds) -> Steps[tuple[Floats, dict[int, mx.array]]]:
        """Return the draft's states of a prompt (N, F), and by layer its unrotated keys and values (N, K + V)."""
        states = np.concatenate([np.array(part) for part in (yield from self._draft_read(self._draft, prompt))[0]])
        held: dict[int, list[mx.array]] = {layer: [] for layer in self._layers.made}
        cache, start = make_positioned_cache(self._pair.target), 0
        for end, _ in feed(self._pair.target, cache, prompt, None, self._ends(prompt.size)):
            for layer, part in enumerate(leaves(cache)):
                if layer in held:
                    held[layer].append(self._layers.unrotated(layer, part, start, end))
            mx.eval(list(held.values()))
            yield self._progress()
            start = end
        return states, {layer: mx.concatenate(parts) for layer, parts in held.items()}

    def _draft_read(self, draft: FirstLayers, prompt: TokenIds) -> Steps[tuple[list[mx.array], list[Any]]]:
        """Return the draft's states of a prompt, forward by forward, and its cache."""
        cache, states, start, tokens = list(make_prompt_cache(draft)), list[mx.array](), 0, mx.array(prompt)[None]
        while start < prompt.size:
            end = min(start + self._step("draft"), prompt.size)
            states.append(draft(tokens[:, start:end], cache)[0].astype(mx.float32))
            mx.eval(states, [part.state for part in cache])
            yield self._progress()
            start = end
        return states, cache

    def _ends(self, size: int) -> Iterator[int]:
        return forward_ends(size, lambda: max(2, self._step("prefill")))

    def _solve(self, sums: _Sums) -> Steps[Estimates]:
        """Return the map that explains most of what was added up."""
        n, mean = sums.count, sums.mean / sums.count
        covariance = sums.square / n - np.outer(mean, mean) + _RIDGE * np.eye(mean.size)
        lower = np.linalg.cholesky(covariance)
        whitened, total = dict[int, Matrix](), np.zeros_like(covariance)
        for layer, product in sums.product.items():
            value, square = sums.of_layer[layer] / n
            whitened[layer] = np.linalg.solve(lower, product / n - np.outer(mean, value))
            spread = np.sqrt(np.maximum(square - value * value, 1e-12))
            total += (whitened[layer] / spread) @ (whitened[layer] / spread).T
            yield self._progress()
        best = np.linalg.eigh(total)[1][:, ::-1][:, : self._rank]
        basis = np.linalg.solve(lower.T, best)
        weights = {layer: best.T @ white for layer, white in whitened.items()}
        offsets = {n_: sums.of_layer[n_][0] / n - mean @ basis @ weights[n_] for n_ in weights}
        return Estimates(
            mx.array(sums.centre),
            mx.array(sums.scale),
            _SEEN * sums.largest,
            _array(basis),
            {layer: _array(array) for layer, array in weights.items()},
            {layer: _array(array) for layer, array in offsets.items()},
        )

    def _explained(self, fitted: Estimates, sums: _Sums, prompts: Sequence[TokenIds]) -> Steps[Estimates]:
        """Return the map without the layers' keys and values that it doesn't explain: there the mean stands in."""
        errors: dict[int, Matrix] = {layer: np.zeros((2, size)) for layer, size in self._layers.made.items()}
        for prompt in prompts:
            states, held = yield from self._read(prompt)
            codes, _ = fitted.codes(mx.array(states))
            for layer, rows in held.items():
                value = sums.of_layer[layer][0] / sums.count
                actual, made = (np.array(one.astype(mx.float32)) for one in (rows, fitted.of_layer(layer, codes)))
                errors[layer] += ((actual - made) ** 2).sum(axis=0), ((actual - value) ** 2).sum(axis=0)
        weights, offsets = dict(fitted.weights), dict(fitted.offsets)
        for layer, (left, whole) in errors.items():
            mean = _array(sums.of_layer[layer][0] / sums.count)
            for part in self._layers.parts(layer):
                if left[part].sum() >= whole[part].sum():
                    weights[layer][:, part], offsets[layer][part] = 0, mean[part]
        return replace(fitted, weights=weights, offsets=offsets)

    def _ratio(self, fitted: Estimates, prompts: Sequence[TokenIds]) -> Steps[float]:
        """Return the divergence of a sparse reading from full reading, as a multiple of the one without estimates.

        Random tokens are read: the geometric mean over prompts.
        """
        estimator, ratios = Estimator(self._pair.target, self._draft, fitted), list[float]()
        draft = CodedDraft(self._draft, fitted)
        special = np.asarray(sorted(self._pair.tokenizer.all_special_ids), dtype=np.int32)
        for number, prompt in enumerate(prompts):
            _, cache = yield from self._draft_read(draft, prompt)
            known = Known(prompt, cache, np.ones(prompt.size, dtype=np.bool_))
            chunks = np.random.default_rng(number).random(-(-prompt.size // _CHUNK)) < _KEPT
            kept = np.repeat(chunks, _CHUNK)[: prompt.size] | np.isin(prompt, special)
            kept[:_CHUNK], kept[-_ASKED:] = True, True
            positions = np.flatnonzero(kept).astype(np.int32)
            full = yield from self._logprobs(prompt, np.arange(prompt.size, dtype=np.int32), place)
            absent = yield from self._logprobs(prompt, positions, place)
            made = yield from self._logprobs(prompt, positions, partial(estimator.place, known=known))
            distances = [float((mx.exp(full) * (full - one)).sum(axis=-1).mean()) for one in (absent, made)]
            ratios.append(max(distances[1], 1e-9) / max(distances[0], 1e-9))
        return float(np.exp(np.mean(np.log(ratios))))

    def _logprobs(self, prompt: TokenIds, positions: Positions, placing: Placing) -> Steps[mx.array]:
        """Return the log-probabilities behind each of the prompt's last tokens, (32, V)."""
        cache, model, tokens = make_positioned_cache(self._pair.target), self._pair.target, prompt[positions]
        before = positions.size - _ASKED
        for _ in feed(model, cache, tokens[:before], positions[:before], self._ends(before), placing=placing):
            yield self._progress()
        placing(cache, positions[before:])
        return log_softmax(model(mx.array(tokens[before:])[None], cache=cache)[0])


def _array(values: Matrix) -> mx.array:
    return mx.array(values.astype(np.float32))


def estimates_refusal(pair: ModelPair) -> str | None:
    """Return why a pair can have no map; None if it may have one."""
    if pair.sparse_refusal is not None:
        return pair.sparse_refusal
    if not isinstance(pair.draft, FirstLayers):
        return "no draft is loaded, or one that runs all of its layers"
    if pair.ranks is not None:
        return "the target runs on several machines"
    return None if pair.mapping is None else "the draft has another tokenizer than the target"


def with_estimates(pair: ModelPair, file: Path | None, folder: Path | None) -> ModelPair:
    """Return the pair with the map in a file, or else with the one that was fitted before.

    Args:
        folder: where maps are kept that were fitted in idle time; None: nowhere.

    Raises:
        LoadError: the file holds no map.
    """
    if not isinstance(pair.draft, FirstLayers) or estimates_refusal(pair) is not None:
        return pair
    if file is not None:
        return estimating_pair(pair, read_estimates(file))
    found = None if folder is None else _stored(fit_file(pair, folder))
    return pair if found is None else estimating_pair(pair, found)


def estimating_pair(pair: ModelPair, estimates: Estimates) -> ModelPair:
    """Return the pair with a map, whose draft keeps codes."""
    assert isinstance(pair.draft, FirstLayers), "no other draft's states are at hand"
    return replace(pair, estimates=estimates, draft=CodedDraft(pair.draft, estimates))


def fit_file(pair: ModelPair, folder: Path) -> Path:
    """Return the file in which a pair's own fit is kept: it exists and is empty where no map helps."""
    assert pair.draft is not None, "a pair without a draft has no map"
    target = model_identity(pair.target, pair.target_config)
    draft = model_identity(full_draft_model(pair.draft), pair.draft_config or {})
    name = hashlib.blake2b(f"{target}:{draft}:{pair.draft_id}".encode(), digest_size=16).hexdigest()
    return folder / f"{name}.safetensors"


def _stored(file: Path) -> Estimates | None:
    """Return the map that was fitted before; None if there is none, or it can't be read (logged)."""
    if not file.is_file() or file.stat().st_size == 0:
        return None
    try:
        return read_estimates(file)
    except LoadError as error:
        log.warning("%s: fitting again", error)
        file.unlink(missing_ok=True)
        return None
