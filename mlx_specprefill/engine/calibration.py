"""Measures what target and draft cost, once per pair and machine. MLX thread only."""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..cache.fingerprint import model_identity
from ..config import EngineConfig
from ..errors import SparseUnsupportedError
from ..loading import ModelPair
from ..prefill.cost import ModelCost, PairCost, Sample, fit
from ..prefill.scoring import score_prompt
from ..prefill.sparse import prefill
from ..request import Progress

__all__ = ["calibrate", "calibrated"]

log = logging.getLogger(__name__)

_LADDER = ((256, 256), (1024, 256), (1024, 1024), (2048, 2048))  # (prompt tokens, tokens per forward)
_FEWEST = 3  # rungs without which nothing can be told from launch costs
_LONG = 8192  # tokens of the prompt that is read in the best steps
_SECONDS = 5.0  # per model for a climb, and for a reading of the long prompt; what does not fit is left out

Read = Callable[[list[int], int], Generator[Progress, None, Any]]


def calibrated(pair: ModelPair, config: EngineConfig) -> PairCost | None:
    """What an earlier start of this pair on this machine has measured, else a measurement that is kept for the next.

    None without a draft, and when measuring fails: the gate then goes by length alone.
    """
    if pair.draft is None or pair.sparse_refusal is not None:
        return None
    try:
        known = _known(_stored(config.calibration_file).get(_key(pair, config)))
        if known is not None:
            return known
        log.info("measuring what target and draft cost on this machine, once")
        return calibrate(pair, config)
    except Exception:
        log.exception("could not measure the pair: sparse prefill goes by the length of the prompt")
        return None


def _known(entry: Any) -> PairCost | None:
    """An entry of the file; None where there is none, or one that another version wrote."""
    try:
        models = ModelCost(**entry["target"]), ModelCost(**entry["draft"])
        return PairCost(*models, entry["target_step"], entry["draft_step"])
    except (TypeError, KeyError):
        return None


def calibrate(pair: ModelPair, config: EngineConfig) -> PairCost:
    """Read prompts of growing length with both models and fit their costs; some twenty seconds per model at most.

    Short prompts in forwards of several lengths tell which length is best; a long one in just these makes the law
    true for what will run. The result is kept in `config.calibration_file`, if there is one. Not for a pair that an
    engine is using.

    Raises:
        SparseUnsupportedError: there is no draft, or it can't score.
    """
    draft = pair.draft
    if draft is None:
        raise SparseUnsupportedError("no draft model is loaded")
    longest = min(pair.context_length, pair.draft_context or pair.context_length)
    rng = np.random.default_rng(0)
    prompt = [int(token) for token in rng.integers(0, pair.vocab_size, min(longest, _LONG))]

    def read_target(tokens: list[int], step: int) -> Generator[Progress, None, Any]:
        return prefill(pair.target, list(make_prompt_cache(pair.target)), tokens, None, step)

    def read_draft(tokens: list[int], step: int) -> Generator[Progress, None, Any]:
        cache = list(make_prompt_cache(draft))
        return score_prompt(draft, tokens, config.scoring, frozenset(), cache, lambda: step)

    cost = _measure(_Model(read_target, prompt), _Model(read_draft, prompt))
    mx.clear_cache()
    _store(config.calibration_file, _key(pair, config), cost)
    return cost


def _measure(target: _Model, draft: _Model) -> PairCost:
    """Both models in turn, twice: other work on the machine slows it down for seconds at a time."""
    models = target, draft
    for model in models:
        model.warm_up()
    for model in models * 2:
        model.climb()
    target.step = target.cost().best_step(_LADDER[-1][1])
    draft.step = draft.cost().best_step(target.step)
    for model in models * 2:
        model.read_long()
    return PairCost(target.cost(), draft.cost(), target.step, draft.step)


@dataclass
class _Samples:
    forwards: list[Sample] = field(default_factory=list)
    ends: list[Sample] = field(default_factory=list)
    seconds: float = 0.0


class _Model:
    """What has been measured of a model.

    Attributes:
        step: its best tokens per forward.
    """

    def __init__(self, read: Read, prompt: list[int]) -> None:
        self.step = 0
        self._read = read
        self._prompt = prompt
        self._forwards: list[Sample] = []
        self._ends: list[Sample] = []

    def cost(self) -> ModelCost:
        """Of two forwards that are alike the faster one counts: nothing makes one faster than it is."""
        return fit(_fastest(self._forwards), _fastest(self._ends))

    def warm_up(self) -> None:
        """Whatever compiles and loads does so now."""
        _read(self._read, self._prompt[: _LADDER[0][0]], _LADDER[0][1])

    def climb(self) -> None:
        """Read short prompts in forwards of several lengths, as far as the time allows."""
        total = last = 0.0
        for rung, (length, step) in enumerate(_LADDER):
            too_long = total + 3 * last > _SECONDS  # twice the tokens take up to four times as long
            if length > len(self._prompt) or (rung >= _FEWEST and too_long):
                break
            last = self._take(length, step)
            total += last

    def read_long(self) -> None:
        self._take(len(self._prompt), self.step)

    def _take(self, length: int, step: int) -> float:
        found = _read(self._read, self._prompt[:length], step)
        self._forwards += found.forwards
        self._ends += found.ends
        return found.seconds


def _fastest(samples: list[Sample]) -> list[Sample]:
    """One of each kind."""
    kinds: dict[tuple[int, int], Sample] = {}
    for sample in sorted(samples, key=lambda sample: sample.ms):
        kinds.setdefault((sample.tokens, sample.offset), sample)
    return list(kinds.values())


def _read(read: Read, tokens: list[int], step: int) -> _Samples:
    """One prompt, slice by slice, as far as the time allows; whatever follows the last slice of many is its end."""
    found, start = _Samples(), 0
    began = mark = time.perf_counter()
    for progress in read(tokens, step):
        if progress.done == len(tokens):
            continue
        now = time.perf_counter()
        found.forwards.append(Sample(progress.done - start, start, 1e3 * (now - mark)))
        start, mark, found.seconds = progress.done, now, now - began
        if found.seconds > _SECONDS:
            return found
    now = time.perf_counter()
    found.ends.append(Sample(len(tokens) - start, len(tokens), 1e3 * (now - mark)))
    found.seconds = now - began
    return found


def _key(pair: ModelPair, config: EngineConfig) -> str:
    assert pair.draft is not None
    models = (model_identity(pair.target, pair.target_config), model_identity(pair.draft, pair.draft_config or {}))
    machine = mx.device_info().get("device_name") or platform.machine()
    threads = os.environ.get("OPENBLAS_NUM_THREADS") or os.cpu_count()
    rows = (config.scoring.rows, config.scoring.pool_width)
    return ":".join(map(str, (*models, mx.default_device(), machine, threads, version("mlx"), *rows)))


def _stored(file: Path | None) -> dict[str, Any]:
    """Measurements by pair and machine; a file that can't be read counts as empty."""
    if file is None or not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        log.warning("%s can't be read: measuring again", file)
        return {}
    return content if isinstance(content, dict) else {}


def _store(file: Path | None, key: str, cost: PairCost) -> None:
    if file is None:
        return
    content = json.dumps(_stored(file) | {key: asdict(cost)}, indent=1)
    new = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(content)
        new.replace(file)
    except OSError as error:
        log.warning("the measurement could not be kept: %s", error)
