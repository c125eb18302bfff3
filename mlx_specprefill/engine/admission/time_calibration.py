"""Measures what target and draft cost, once per pair and machine. MLX thread only."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ..._replacing import replace_text
from ...cache.fingerprint import model_identity
from ...config import EngineConfig
from ...distributed.leading import led
from ...errors import RequestCancelled, SparseUnsupportedError
from ...loading import ModelPair
from ...request import Progress
from ...specprefill.scorer import ToScore
from ...specprefill.scorers import scorer_for
from ...specprefill.sparse_prefill import prefill
from .cost import ModelCost, PairCost, Sample, fit

__all__ = ["calibrate", "calibrated", "known_cost"]

log = logging.getLogger(__name__)

_STEPS = (256, 512, 1024, 2048)  # tokens per forward that are tried, upwards as long as that is faster
_SHORTER = 128  # is tried where the shortest of these is the fastest
_EQUAL = 1.02  # times the fastest: among steps so close the longest is taken, which launches least
_TRIED = 2048  # tokens of the prompt that they are tried on
_LONG = 8192  # tokens of the prompt that is read in the best steps
_SECONDS = 5.0  # for the long prompt; what is not read by then is left out. The short one takes half of it at most

Read = Callable[[list[int], int], Generator[Progress, None, Any]]


def calibrated(
    pair: ModelPair,
    config: EngineConfig,
    given_up: Callable[[], bool] = lambda: False,
    pause: Callable[[], None] = lambda: None,
) -> PairCost | None:
    """What an earlier start of this pair on this machine has measured, else a measurement that is kept for the next.

    None without a draft, and when measuring fails: the gate then goes by length alone.
    """
    if not pair.drafted or pair.sparse_refusal is not None:
        return None
    try:
        known = pair.ranks.agree("known cost", lambda: known_cost(pair, config))
        if known is not None:
            return known
        log.info("measuring what target and draft cost on this machine, once")
        cost = calibrate(pair, config, given_up, pause)
        return pair.ranks.agree("cost", lambda: cost)
    except RequestCancelled:
        return None
    except Exception:
        log.exception("could not measure the pair: sparse prefill goes by the length of the prompt")
        return None


def known_cost(pair: ModelPair, config: EngineConfig) -> PairCost | None:
    """What an earlier calibration of this pair on this machine has kept; measures nothing."""
    if pair.draft is None:
        return None
    known = _known(_stored(config.calibration_file).get(_key(pair, config)))
    return known and replace(known, staged=pair.stages is not None, draft_ratio=pair.draft_ratio)


def _known(entry: Any) -> PairCost | None:
    """An entry of the file; None where there is none, or one that another version wrote."""
    try:
        models = ModelCost(**entry["target"]), ModelCost(**entry["draft"])
        return PairCost(*models, entry["target_step"], entry["draft_step"])
    except (TypeError, KeyError):
        return None


def calibrate(
    pair: ModelPair,
    config: EngineConfig,
    given_up: Callable[[], bool] = lambda: False,
    pause: Callable[[], None] = lambda: None,
) -> PairCost:
    """Read prompts of growing length with both models and fit their costs; some twenty seconds per model at most.

    A short prompt read in forwards of several lengths tells which length is best; a long one in just these makes the
    fit true for what will run. The result is kept in `config.calibration_file`, if there is one. Not for a pair that an
    engine is using.

    Args:
        given_up: asked between two forwards.
        pause: called between two forwards; what it takes is not measured.

    Raises:
        SparseUnsupportedError: there is no draft, or it can't score.
        RequestCancelled: it was given up.
    """
    if not pair.drafted:
        raise SparseUnsupportedError("no draft model is loaded")
    prompt = pair.ranks.agree("measured prompt", lambda: _prompt(pair))

    def read_target(tokens: list[int], step: int) -> Generator[Progress, None, Any]:
        return prefill(pair.target, list(make_prompt_cache(pair.target)), tokens, None, step)

    def read_draft(tokens: list[int], step: int) -> Generator[Progress, None, Any]:
        if pair.draft_placement == "first":
            return led(pair.ranks, "draft", lambda: _without_result(_read_draft(pair, config, tokens, step)))
        return _read_draft(pair, config, tokens, step)

    clock = partial(pair.ranks.agree, "time", time.perf_counter)
    ended = partial(pair.ranks.agree, "given up", given_up)
    models = (_Model(partial(_until, ended, read), prompt, pause, clock) for read in (read_target, read_draft))
    cost = replace(_measure(*models), staged=pair.stages is not None, draft_ratio=pair.draft_ratio)
    mx.clear_cache()
    if pair.draft is not None:
        _store(config.calibration_file, _key(pair, config), cost)
    return cost


def _prompt(pair: ModelPair) -> list[int]:
    longest = min(pair.context_length, pair.draft_context or pair.context_length)
    vocabulary = pair.vocab_size if pair.mapping is None else min(pair.vocab_size, len(pair.draft_tokenizer))
    return [int(token) for token in np.random.default_rng(0).integers(0, vocabulary, min(longest, _LONG))]


def _read_draft(pair: ModelPair, config: EngineConfig, tokens: list[int], step: int) -> Generator[Progress, None, Any]:
    assert pair.draft is not None
    cache = list(make_prompt_cache(pair.draft))
    seen = None if pair.stages is None else _computed
    task = ToScore.alone(pair.draft, tokens, config.scoring, cache=cache, step=lambda: step, seen=seen)
    return scorer_for(config.rule, pair.heads, config.scoring, pair.split).score(pair.draft, task)


def _without_result(work: Generator[Progress, None, Any]) -> Generator[Progress, None, None]:
    yield from work


def _computed(_: int, hidden: mx.array) -> None:
    """What the first layers of a target pass on, MLX would leave out if nobody asked for it."""
    mx.eval(hidden)


def _until(given_up: Callable[[], bool], read: Read, tokens: list[int], step: int) -> Generator[Progress, None, None]:
    for progress in read(tokens, step):
        if given_up():
            raise RequestCancelled
        yield progress


def _measure(target: _Model, draft: _Model) -> PairCost:
    """Everything twice, and the models in turn: other work on the machine slows it down for seconds at a time."""
    target.try_steps(_STEPS[-1])
    draft.try_steps(target.step)
    for model in (target, draft) * 2:
        model.read_long()
    return PairCost(target.cost(), draft.cost(), target.step, draft.step)


@dataclass
class _Samples:
    forwards: list[Sample] = field(default_factory=list)
    ends: list[Sample] = field(default_factory=list)
    seconds: float = 0.0


class _Model:
    """What has been measured of a model."""

    def __init__(self, read: Read, prompt: list[int], pause: Callable[[], None], clock: Callable[[], float]) -> None:
        self._read = read
        self._prompt = prompt
        self._pause = pause
        self._clock = clock
        self._forwards: list[Sample] = []
        self._ends: list[Sample] = []
        self._seconds: dict[int, float] = {}  # that the short prompt took, by tokens per forward

    @property
    def step(self) -> int:
        """Its best tokens per forward of those that were tried."""
        fastest = min(self._seconds.values())
        return max(step for step, seconds in self._seconds.items() if seconds <= _EQUAL * fastest)

    def cost(self) -> ModelCost:
        """The fit for forwards of at most the best length: longer ones may follow another.

        Of two forwards that are alike the faster one counts: nothing makes one faster than it is.
        """
        forwards = [sample for sample in self._forwards if sample.tokens <= self.step]
        return fit(_fastest(forwards), _fastest(self._ends))

    def try_steps(self, longest: int) -> None:
        """Read a short prompt in forwards of several lengths, none above `longest`, all of them twice."""
        length = min(_STEPS[0], len(self._prompt))
        self._take(length, length, kept=False)  # whatever compiles and loads does so now
        seconds = self._take(length, length).seconds
        tried = min(_TRIED, len(self._prompt), max(1, int(_SECONDS / 2 / seconds)) * length)
        for _ in range(2):
            self._climb(tried, longest)

    def _climb(self, length: int, longest: int) -> None:
        """Longer forwards as long as that is faster; shorter ones where it never is."""
        self._time(length, min(_STEPS[0], longest))
        for step in (step for step in _STEPS[1:] if step <= min(length, longest)):
            self._time(length, step)
            if self._seconds[step] > _EQUAL * min(self._seconds.values()):
                break
        if self.step == _STEPS[0]:
            self._time(length, _SHORTER)

    def _time(self, length: int, step: int) -> None:
        self._seconds[step] = min(self._take(length, step).seconds, self._seconds.get(step, math.inf))

    def read_long(self) -> None:
        """As far as the time allows."""
        self._take(len(self._prompt), self.step, _SECONDS)

    def _take(self, length: int, step: int, limit_s: float = math.inf, kept: bool = True) -> _Samples:
        found = _read(self._read, self._prompt[:length], step, self._pause, limit_s, self._clock)
        if kept:
            self._forwards += found.forwards
            self._ends += found.ends
        return found


def _fastest(samples: list[Sample]) -> list[Sample]:
    """One of each kind."""
    kinds: dict[tuple[int, int], Sample] = {}
    for sample in sorted(samples, key=lambda sample: sample.ms):
        kinds.setdefault((sample.tokens, sample.offset), sample)
    return list(kinds.values())


def _read(
    read: Read,
    tokens: list[int],
    step: int,
    pause: Callable[[], None],
    limit_s: float = math.inf,
    clock: Callable[[], float] = lambda: time.perf_counter(),
) -> _Samples:
    """One prompt, slice by slice, until the time is up; whatever follows the last slice of many is its end."""
    found, start = _Samples(), 0
    began = mark = clock()
    for progress in read(tokens, step):
        if progress.done == len(tokens):
            continue
        now = clock()
        found.forwards.append(Sample(progress.done - start, start, 1e3 * (now - mark)))
        start, found.seconds = progress.done, now - began
        if found.seconds > limit_s:
            return found
        pause()
        mark = clock()
        began += mark - now
    now = clock()
    found.ends.append(Sample(len(tokens) - start, len(tokens), 1e3 * (now - mark)))
    found.seconds = now - began
    return found


def _key(pair: ModelPair, config: EngineConfig) -> str:
    assert pair.draft is not None
    models = (model_identity(pair.target, pair.target_config), model_identity(pair.draft, pair.draft_config or {}))
    machine = mx.device_info().get("device_name") or platform.machine()
    threads = os.environ.get("OPENBLAS_NUM_THREADS") or os.cpu_count()
    scorer = pair.heads.by_call if config.rule == "default" and pair.heads is not None else config.scoring.rows
    rows = (scorer, config.scoring.pool_width)
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
    try:
        replace_text(file, content)
    except OSError as error:
        log.warning("the measurement could not be kept: %s", error)
