"""Predicts prefill times from the chunks that have run, and sizes the next chunks by them.

A forward over n tokens behind s others takes `fixed + token * n + pair * n * (s + n / 2)` milliseconds. The fixed part
does not depend on the length. It is small in dense models and large in mixtures of experts, whose experts are nearly
all read by a chunk of a hundred tokens or more.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from .._files import replace_text
from ..cache.positioned import leaves
from ..cache.prefix.nodes import model_identity
from ..config import EngineConfig
from ..loading import ModelPair
from ..request import Event, Prediction, Progress
from ..specprefill.sparse_prefill import TAIL
from .footprint import MOST_PAIRS
from .scheduler import Scheduler
from .sequence import Job

log = logging.getLogger(__name__)

ForwardKind = Literal["draft", "target", "upper", "select"]
"""The draft, the whole target, the target's layers behind the scoring layers, and the selection of tokens."""

_REMEMBERED = 96  # forwards
_HALF_LIFE = 12  # forwards after which an observation counts half, to follow a machine that becomes busy
_LEAST_TOKENS = 16  # shorter forwards are not timed
_ROUNDS = 12
_EXACT = 1e-3  # relative error below which observations count alike
_RIDGE = 1e-9  # keeps a system solvable if all observations are alike
_SUBSETS = [list(chosen) for size in (1, 2, 3) for chosen in combinations(range(3), size)]  # of the three coefficients
# (tokens, depth) of the observations that the prior stands for, and the weight of each beside a new one.
_PRIOR_POINTS = ((32, 0), (256, 512), (1024, 4096), (2048, 16384))
_PRIOR_WEIGHT = 0.1
_AGREES = 0.05  # relative error of a new observation that needs no new fit
# Assumed floating-point operations per second of a prior. The first forwards correct it.
_PRIOR_RATE = {"gpu": 5e12, "cpu": 5e10}
# Fixed part in tokens, fitted to published prefill times of mixtures of experts (140 and 161).
_PRIOR_FIXED_MOE, _PRIOR_FIXED_DENSE = 150, 16


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """Milliseconds of one model's forward: fixed, per token, and per pair of a token and one that it attends to."""

    fixed: float
    token: float
    pair: float

    def ms(self, tokens: int, depth: int = 0) -> float:
        """Return the time of one forward over `tokens` behind `depth` others."""
        return self.fixed + tokens * (self.token + self.pair * (depth + tokens / 2))

    def prefill_ms(self, tokens: int, depth: int, step: int) -> float:
        """Return the time of a prefill in forwards of `step` tokens."""
        if tokens <= 0:
            return 0.0
        before = math.ceil((tokens - TAIL) / step) if tokens > 2 * TAIL else 0
        return self.fixed * before + self.ms(tokens, depth)

    def fitting(self, ms: float, depth: int) -> int:
        """Return the most tokens behind `depth` others that one forward can read in `ms`; 0 if none."""
        rest = ms - self.fixed
        if rest <= 0:
            return 0
        first = max(self.token + self.pair * depth, 1e-9)
        if self.pair * rest < 1e-9:
            return int(rest / first)
        return int((math.sqrt(first * first + 2 * self.pair * rest) - first) / self.pair)

    def losing(self, share: float, depth: int) -> int:
        """Return the fewest tokens of a forward whose fixed part takes at most this share."""
        return math.ceil(self.fixed * (1 - share) / share / max(self.token + self.pair * depth, 1e-9))

    def scale(self, factor: float) -> ForwardCost:
        return ForwardCost(*(factor * part for part in (self.fixed, self.token, self.pair)))


@dataclass(frozen=True, slots=True)
class _Forward:
    tokens: int
    depth: int
    ms: float


class LearntCost:
    """The cost of one kind of forward. Written by the MLX thread, read by any.

    Other work on the machine only slows a forward down. So the fit minimises the sum of relative errors, not of their
    squares: half of the observations may be slow without moving it far.

    Args:
        prior: the cost before the first observation. Later its shape counts a little, at the observed speed.
    """

    def __init__(self, prior: ForwardCost) -> None:
        self._prior = prior
        self._seen: deque[_Forward] = deque(maxlen=_REMEMBERED)
        self._cost = prior
        self.count = 0

    @property
    def cost(self) -> ForwardCost:
        return self._cost

    @property
    def speed(self) -> float | None:
        """Return the machine's slowness relative to the prior; None before the first observation."""
        ratios = [seen.ms / max(self._prior.ms(seen.tokens, seen.depth), 1e-9) for seen in tuple(self._seen)]
        return statistics.median(ratios) if ratios else None

    def assume(self, prior: ForwardCost) -> None:
        """Replace the prior, unless there are observations."""
        if not self._seen:
            self._prior = self._cost = prior

    def observe(self, tokens: int, depth: int, ms: float) -> None:
        """Learn that a forward over `tokens` behind `depth` others took `ms`."""
        if tokens < _LEAST_TOKENS or ms <= 0:
            return
        self._seen.append(_Forward(tokens, depth, ms))
        self.count += 1
        if self.count < _HALF_LIFE or abs(self._cost.ms(tokens, depth) / ms - 1) > _AGREES:
            self._cost = self._fit()

    def _fit(self) -> ForwardCost:
        newest = len(self._seen) - 1
        weighted = [(seen, 2 ** ((index - newest) / _HALF_LIFE)) for index, seen in enumerate(self._seen)]
        prior = self._prior.scale(self.speed or 1.0)
        weighted += [(_Forward(n, s, prior.ms(n, s)), _PRIOR_WEIGHT) for n, s in _PRIOR_POINTS if prior.ms(n, s) > 0]
        columns = [(1.0, f.tokens, f.tokens * (f.depth + f.tokens / 2)) for f, _ in weighted]
        relative = np.array(columns) / np.array([f.ms for f, _ in weighted])[:, None]
        return ForwardCost(*_least_errors(relative, np.array([weight for _, weight in weighted])))


def _least_errors(rows: np.ndarray, weights: np.ndarray) -> list[float]:
    """Return the non-negative coefficients with the smallest weighted sum of |1 - rows @ coefficients|.

    Uses least squares with weights that follow the errors.
    """
    scale = np.maximum(np.sqrt((rows**2).mean(axis=0)), 1e-30)  # the columns differ by orders of magnitude
    rows, current = rows / scale, weights
    for _ in range(_ROUNDS):
        found = _non_negative(rows, current)
        current = weights / np.maximum(np.abs(1 - rows @ found), _EXACT)
    return [float(value) for value in found / scale]


def _non_negative(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Solve the weighted least squares of `rows @ coefficients = 1` for coefficients that are not negative."""
    weighted = rows * weights[:, None]
    matrix, vector = weighted.T @ rows + _RIDGE * weights.sum() * np.eye(3), weighted.sum(axis=0)
    best, gain = np.zeros(3), 0.0
    for chosen in _SUBSETS:
        values = np.linalg.solve(matrix[np.ix_(chosen, chosen)], vector[chosen])
        explained = float(values @ vector[chosen])
        if (values >= 0).all() and explained > gain:
            best, gain = np.zeros(3), explained
            best[chosen] = values
    return best


class CostModel:
    """Costs of target and draft on this machine, for the gate, the chunk sizes, predictions and progress.

    Args:
        pair: whose models run.
        config: `calibration_file` keeps the costs between starts.
    """

    def __init__(self, pair: ModelPair, config: EngineConfig) -> None:
        self._ratio = pair.draft_ratio
        self._staged = pair.stages is not None
        self._file = config.calibration_file
        target = prior_cost(pair.target, pair.target_config)
        draft = ForwardCost(0, 0, 0) if pair.draft is None else prior_cost(pair.draft, pair.draft_config or {})
        priors: dict[ForwardKind, ForwardCost] = {
            "draft": draft,
            "target": target,
            "upper": _without(target, draft),
            "select": ForwardCost(0, 0, 0),
        }
        self._learnt = {kind: LearntCost(prior) for kind, prior in priors.items()}
        self._pair = pair
        self._stored = 0  # observations at the latest `store`

    def cost(self, kind: ForwardKind) -> ForwardCost:
        """Return the cost of one forward. A kind that never ran deviates from its prior as the others do."""
        learnt = self._learnt[kind]
        if learnt.count:
            return learnt.cost
        speeds = [
            speed for other in self._learnt.values() if (speed := other.speed) is not None and other is not learnt
        ]
        return learnt.cost.scale(statistics.median(speeds)) if speeds else learnt.cost

    def observe(self, kind: ForwardKind, tokens: int, depth: int, ms: float) -> None:
        """Learn from a forward. MLX thread only."""
        self._learnt[kind].observe(tokens, depth, ms)

    def predict(
        self, tokens: int, kept: int, cached: int, steps: tuple[int, int], draft_cached: int | None = None
    ) -> Prediction:
        """Return the times of both ways to continue a prompt. May be called from any thread.

        Args:
            tokens: length of the whole prompt.
            kept: tokens of the uncached rest that the target would see.
            cached: prompt tokens that the target's cache holds; `draft_cached` the draft's, None: as many.
            steps: tokens per forward of target and draft.
        """
        step, draft_step = steps
        full = self.cost("target").prefill_ms(tokens - cached, cached, step)
        held = cached if draft_cached is None else draft_cached
        new = round((tokens - held) * self._ratio)
        draft = self.cost("draft").prefill_ms(new, round(held * self._ratio), draft_step)
        chosen = self._learnt["select"].cost.ms(tokens)
        upper = self.cost("upper" if self._staged else "target").prefill_ms(kept, cached, step)
        return Prediction(full, draft + chosen + upper)

    # --- between starts ----------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Load the stored costs of these models on this machine. MLX thread only."""
        if self._file is None:
            return
        stored = _read(self._file).get(self._key)
        for kind, learnt in self._learnt.items():
            if (known := _stored_cost(stored, kind)) is not None:
                learnt.assume(known)

    def store(self) -> None:
        """Store new observations for the next start. MLX thread only."""
        count = sum(learnt.count for learnt in self._learnt.values())
        if self._file is None or count == self._stored:
            return
        self._stored = count
        costs = {kind: [cost.fixed, cost.token, cost.pair] for kind, cost in self._costs() if cost.token or cost.fixed}
        try:
            replace_text(self._file, json.dumps(_read(self._file) | {self._key: costs}, indent=1))
        except OSError as error:
            log.warning("the learnt costs could not be kept: %s", error)

    def _costs(self) -> Iterator[tuple[ForwardKind, ForwardCost]]:
        for kind, learnt in self._learnt.items():
            if learnt.count:
                yield kind, learnt.cost

    @property
    def _key(self) -> str:
        pair = self._pair
        models = [model_identity(pair.target, pair.target_config)]
        if pair.draft is not None:
            models.append(model_identity(pair.draft, pair.draft_config or {}))
        name = mx.device_info().get("device_name") or platform.machine()
        threads = os.environ.get("OPENBLAS_NUM_THREADS") or os.cpu_count()
        return ":".join(map(str, ("chunks", *models, mx.default_device(), name, threads, version("mlx"))))


def prior_cost(model: nn.Module, config: Mapping[str, Any]) -> ForwardCost:
    """Return the cost estimated from a model's work: active parameters, and attention by layer.

    Args:
        config: its config.json.
    """
    text = {**config, **config.get("text_config", {})}
    active, experts = _active_parameters(model, text)
    rate = _PRIOR_RATE["gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"] / 1e3  # per millisecond
    token = 2 * active / rate
    width = int(text.get("num_attention_heads", 1)) * int(text.get("head_dim") or 128)
    attending = sum(isinstance(part, KVCache) for part in leaves(make_prompt_cache(model)))
    fixed = _PRIOR_FIXED_MOE if experts else _PRIOR_FIXED_DENSE
    return ForwardCost(fixed * token, token, 4 * width * attending / rate)


def _active_parameters(model: nn.Module, config: Mapping[str, Any]) -> tuple[int, bool]:
    """Return the number of weights that a prompt's token uses, and whether there are experts.

    The output projection does not count: only a prefill's last tokens meet it. It would dominate a small draft.
    """
    total, experts = 0, False
    for name, module in model.named_modules():
        if name.endswith("lm_head"):
            continue
        if isinstance(module, (SwitchLinear, QuantizedSwitchLinear)):
            used = next((int(config[key]) for key in _USED_EXPERTS if config.get(key)), 1)
            total += _elements(module) * used // max(int(module.weight.shape[0]), 1)
            experts = True
        elif isinstance(module, (nn.Linear, nn.QuantizedLinear)):
            total += _elements(module)
    return total, experts


_USED_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")


def _elements(module: nn.Module) -> int:
    bits = int(getattr(module, "bits", 32))  # packed weights are counted in words of 32 bits
    return int(module.weight.size) * 32 // bits


def _without(whole: ForwardCost, first: ForwardCost) -> ForwardCost:
    """Return the cost of the layers behind the first ones."""
    parts = ((whole.fixed, first.fixed), (whole.token, first.token), (whole.pair, first.pair))
    return ForwardCost(*(max(0.0, all_of_it - some) for all_of_it, some in parts))


def _read(file: Path) -> dict[str, Any]:
    """Return the stored costs by key; empty if the file can't be read."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        log.warning("%s can't be read: costs are learnt anew", file)
        return {}
    return content if isinstance(content, dict) else {}


def _stored_cost(stored: Any, kind: str) -> ForwardCost | None:
    """Return a stored cost; None if it is missing or malformed."""
    values = stored.get(kind) if isinstance(stored, dict) else None
    if not isinstance(values, list) or len(values) != 3 or not all(isinstance(value, int | float) for value in values):
        return None
    usable = all(math.isfinite(value) and value >= 0 for value in values) and any(values)
    return ForwardCost(*map(float, values)) if usable else None


_SMALLEST = 64  # tokens of a chunk that requests wait for
_SMALLEST_BACKGROUND = 16
# Beside other requests a chunk is no shorter than what loses this share of its time to the forward's fixed cost.
_FIXED_SHARE = 1 / 3


class ChunkSizer:
    """Sizes chunks for the job whose turn it is. MLX thread only, but for `expected`.

    Alone, a prefill runs in chunks of `EngineConfig.prefill_step`. Beside other requests a chunk takes about
    `target_itl_ms`. It is never so short that a third of its time would be the fixed cost of a forward, but for those
    of idle work.

    Attributes:
        largest: tokens of a chunk at most.
        elsewhere: answers of other engines wait for the chunk to end.
    """

    def __init__(self, pair: ModelPair, config: EngineConfig, scheduler: Scheduler, costs: CostModel) -> None:
        self._pair = pair
        self._scheduler = scheduler
        self._costs = costs
        self._target_ms = config.target_itl_ms
        self._job: Job | None = None
        self._given = 0  # tokens of the latest chunk at most
        self.largest = config.prefill_step
        self.elsewhere = False

    def begin(self, job: Job) -> None:
        """Size the chunks that are asked for from now on for this job."""
        self._job = job

    def end(self, job: Job) -> None:
        """Let go of a job that gets no more chunks."""
        if self._job is job:
            self._job = None

    def halve(self) -> int:
        """Make the longest chunk half as long, and return its tokens."""
        self.largest = max(min(_SMALLEST, self.largest), self.largest // 2)
        return self.largest

    def size(self, stage: str) -> int:
        """Return the tokens of the next forward of "draft" or "prefill"."""
        job = self._job
        depth = 0 if job is None else job.depth(stage)
        contended = self.elsewhere or self._scheduler.is_contended
        self._given = self._size(_kind(stage, job), depth, contended, job is not None and job.background)
        return self._given

    def expected_tokens(self, stage: str) -> int:
        """Return the tokens of a forward at the start of another prompt; from any thread."""
        return self._size(_kind(stage, None), 0, bool(self._scheduler.decoding), False)

    def _size(self, kind: ForwardKind, depth: int, contended: bool, background: bool) -> int:
        largest = min(self.largest, max(_SMALLEST, MOST_PAIRS // max(depth, 1)))
        if not (contended or background):
            return largest
        cost = self._costs.cost(kind)
        smallest = _SMALLEST_BACKGROUND if background else _SMALLEST
        fitting = cost.fitting(self._target_ms, depth) // smallest * smallest
        if background:
            return min(largest, max(smallest, fitting))
        least = math.ceil(cost.losing(_FIXED_SHARE, depth) / smallest) * smallest
        return min(largest, max(smallest, fitting, least))

    def observe(self, job: Job, event: Event) -> None:
        """Record the progress and time of the job's latest chunk."""
        if not isinstance(event, Progress):
            return
        if event.cached is not None:
            job.cached = event.cached
        ms, depth, stage = 1e3 * job.step_s, job.depth(event.stage), event.stage
        tokens = max(0, event.done - job.done.get(stage, 0))
        job.done[stage] = event.done
        reads = stage in ("draft", "prefill")
        self._scheduler.record(job.uid, event.total - event.done if reads else None, round(ms))
        if job.sequence is not None:
            job.sequence.spend(stage, ms)
        if stage == "select":
            self._costs.observe("select", event.total, 0, ms)
        elif reads and tokens <= self._given:  # more than was given out came from the draft's cache
            self._costs.observe(_kind(stage, job), tokens, depth, ms)


def _kind(stage: str, job: Job | None) -> ForwardKind:
    """Return which layers the forwards of a stage run through."""
    if stage == "draft":
        return "draft"
    return "upper" if job is not None and job.sequence is not None and job.sequence.staged else "target"
