"""Decides which request is admitted, which prefill gets the next chunk, and how long that is.

One step of the engine is one decode step of all running requests, then prefill chunks. The prefill with the fewest
tokens left goes first, in admission and for each chunk, so a short prompt is never stuck behind a long one. Ageing
keeps the long ones going: the oldest prefill gets a fifth of the time, and the request that has waited longest every
fourth place. A quarter of the places is kept for short prompts. Background work runs when there is no request.

A chunk is sized by the cost of a forward, as learnt from the chunks that have run. A forward over n tokens behind s
others takes `fixed + token * n + pair * n * (s + n / 2)` milliseconds. The fixed part does not depend on the length. It
is small in dense models and large in mixtures of experts, whose experts are nearly all read by a chunk of a hundred
tokens or more.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from .._files import replace_text
from ..cache.positioned import leaves
from ..cache.prefix.nodes import model_identity
from ..config import EngineConfig
from ..loading import ModelPair
from ..request import Event, Prediction, Progress
from ..specprefill.sparse_prefill import TAIL
from .memory import MOST_PAIRS, weight_bytes
from .sequence import AnswerJob, Job

log = logging.getLogger(__name__)

_SHORT = 256  # tokens; or half as many as the median request
_SHORT_PLACES = 4  # one place in this many is kept for short prompts
_EVERY = 4  # one in this many admissions goes to the request that has waited longest
_OTHERS = 4  # milliseconds for other prefills per millisecond of the oldest one
_PASSES = 64  # admissions of others after which it is next, even if memory has to become free first


@dataclass
class _Prefill:
    uid: int
    left: int  # known tokens to read
    is_short: bool


class Scheduler:
    """Waiting, prefilling and decoding requests by uid. Integers only: no arrays, clocks, threads.

    Args:
        max_rows: requests that may hold a cache at once, prefilling or decoding.
        patience: milliseconds that others may have before the oldest prefill gets a chunk.
    """

    def __init__(self, max_rows: int = 32, patience: int = 800) -> None:
        self.max_rows = max_rows
        self.patience = patience
        self._kept = max_rows // _SHORT_PLACES
        self._waiting: dict[int, int] = {}  # tokens left, in order of arrival
        self._prefilling: dict[int, _Prefill] = {}  # in order of admission
        self._decoding: dict[int, bool] = {}  # by uid, whether its prompt was short
        self._background: list[int] = []
        self._passed = 0  # admissions of others since the first request in line is first
        self._waited = 0  # milliseconds of others, less those that the oldest prefill's own chunks allow

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Return the number of admitted requests. May be called from any thread."""
        return len(self._decoding) + len(self._prefilling)

    @property
    def decoding(self) -> frozenset[int]:
        return frozenset(self._decoding)

    @property
    def is_contended(self) -> bool:
        """Return whether another request waits for a chunk to end. May be called from any thread."""
        return bool(self._decoding) or self.running + self.waiting > 1

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._prefilling or self._decoding or self._background)

    def add(self, uid: int, left: int = 1 << 30) -> None:
        """Queue a request with `left` known tokens to read, or correct these tokens of a waiting one."""
        self._waiting[uid] = left

    def add_background(self, uid: int) -> None:
        """Add a job that yields to every request. It needs no admission."""
        self._background.append(uid)

    def next_waiting(self, passing: bool = False) -> int | None:
        """Return the request to admit next; None where there is none, or no place for it.

        Args:
            passing: the last one returned does not fit in memory: return a shorter one that may pass it.
        """
        if not self._waiting or self.running >= self.max_rows:
            return None
        first = next(iter(self._waiting))
        shortest = min(self._waiting, key=lambda uid: self._waiting[uid])
        if passing:
            return shortest if shortest != first and self._passed < _PASSES and self._is_short(shortest) else None
        short = sum(self._decoding.values()) + sum(job.is_short for job in self._prefilling.values())
        on_kept_places = min(self._kept, short)
        if self.running - on_kept_places >= self.max_rows - self._kept:
            return shortest if self._is_short(shortest) else None
        return first if self._passed >= _PASSES or self._passed % _EVERY == _EVERY - 1 else shortest

    def _is_short(self, uid: int) -> bool:
        left = [*self._waiting.values(), *(job.left for job in self._prefilling.values())]
        return self._waiting[uid] <= max(_SHORT, statistics.median_low(left) // 2)

    def admit(self, uid: int) -> None:
        """Let a waiting request start its prefill."""
        self._passed = 0 if uid == next(iter(self._waiting)) else self._passed + 1
        # Before the removal: other threads read `waiting`, then `running`, and must find the request in one.
        self._prefilling[uid] = _Prefill(uid, self._waiting[uid], self._is_short(uid))
        del self._waiting[uid]

    def pick(self) -> int | None:
        """Return the prefill that gets the next chunk."""
        if not self._prefilling:
            return None if self._decoding or self._waiting else next(iter(self._background), None)
        oldest, shortest = next(iter(self._prefilling)), min(self._prefilling.values(), key=lambda job: job.left)
        return oldest if self._waited >= self.patience and shortest.left > 0 else shortest.uid

    def record(self, uid: int, left: int | None, ms: int) -> None:
        """Record the milliseconds of the chunk that `pick` chose, and the prompt's tokens left, if known."""
        job = self._prefilling.get(uid)
        if job is None:
            return
        if left is not None:
            job.left = left
        if uid == next(iter(self._prefilling)):
            self._waited = max(0, self._waited - _OTHERS * ms)
        else:  # at most the credit of one chunk, so that two in a row never delay a short prompt
            self._waited = min(self._waited + ms, self.patience)

    def to_decode(self, uid: int) -> None:
        self._decoding[uid] = self._prefilling[uid].is_short
        del self._prefilling[uid]

    def remove(self, uid: int) -> None:
        """Remove a request in any state."""
        self._waiting.pop(uid, None)
        self._prefilling.pop(uid, None)
        self._decoding.pop(uid, None)
        self._background = [other for other in self._background if other != uid]


ForwardKind = Literal["draft", "target", "upper", "select"]
"""The draft, the whole target, the target's layers behind the scoring layers, and the selection of tokens."""

_REMEMBERED = 96  # forwards
_HALF_LIFE = 12  # forwards after which an observation counts half, to follow a machine that becomes busy
_LEAST_TOKENS = 8  # shorter forwards are not timed
_ROUNDS = 12
_EXACT = 1e-3  # relative error below which observations count alike
_RIDGE = 1e-9  # keeps a system solvable if all observations are alike
_SUBSETS = np.array([s for s in product((0.0, 1.0), repeat=3) if any(s)])  # of the three coefficients, (7, 3)
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

    def most_tokens(self, ms: float, depth: int) -> int:
        """Return the most tokens behind `depth` others that one forward can read in `ms`; 0 if none."""
        rest = ms - self.fixed
        if rest <= 0:
            return 0
        first = max(self.token + self.pair * depth, 1e-9)
        if self.pair * rest < 1e-9:
            return int(rest / first)
        return int((math.sqrt(first * first + 2 * self.pair * rest) - first) / self.pair)

    def fewest_tokens(self, share: float, depth: int) -> int:
        """Return the fewest tokens of a forward whose fixed part takes at most this share."""
        return math.ceil(self.fixed * (1 - share) / share / max(self.token + self.pair * depth, 1e-9))

    def scale(self, factor: float) -> ForwardCost:
        return ForwardCost(*(factor * part for part in (self.fixed, self.token, self.pair)))


class _Forward(NamedTuple):
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
        self.cost = prior
        self.count = 0

    @property
    def speed(self) -> float | None:
        """Return the machine's slowness relative to the prior; None before the first observation."""
        ratios = [seen.ms / max(self._prior.ms(seen.tokens, seen.depth), 1e-9) for seen in tuple(self._seen)]
        return statistics.median(ratios) if ratios else None

    def assume(self, prior: ForwardCost) -> None:
        """Replace the prior, unless there are observations."""
        if not self._seen:
            self._prior = self.cost = prior

    def observe(self, tokens: int, depth: int, ms: float) -> None:
        """Learn that a forward over `tokens` behind `depth` others took `ms`."""
        if tokens < _LEAST_TOKENS or ms <= 0:
            return
        self._seen.append(_Forward(tokens, depth, ms))
        self.count += 1
        if self.count < _HALF_LIFE or abs(self.cost.ms(tokens, depth) / ms - 1) > _AGREES:
            self.cost = self._fit()

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
    # One system for each subset. A coefficient outside of it has an equation of its own, and is 0.
    inside = _SUBSETS[:, :, None] * _SUBSETS[:, None, :]
    systems = matrix * inside + np.eye(3) * (1 - _SUBSETS[:, :, None])
    solved = np.linalg.solve(systems, (_SUBSETS * vector)[:, :, None])[:, :, 0]
    explained = np.where((solved >= 0).all(axis=1), solved @ vector, 0.0)
    best = int(explained.argmax())
    return solved[best] if explained[best] > 0 else np.zeros(3)


class CostModel:
    """Costs of target and draft on this machine, for the gate, the chunk sizes, predictions and progress.

    Args:
        pair: whose models run.
        config: `calibration_file` keeps the costs between starts.
    """

    def __init__(self, pair: ModelPair, config: EngineConfig) -> None:
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

    def predict(self, tokens: int, kept: int, cached: int, steps: tuple[int, int]) -> Prediction:
        """Return the times of both ways to continue a prompt. May be called from any thread.

        Args:
            tokens: length of the whole prompt.
            kept: tokens of the uncached rest that the target would see.
            cached: prompt tokens that the caches of both models hold.
            steps: tokens per forward of target and draft.
        """
        step, draft_step = steps
        full = self.cost("target").prefill_ms(tokens - cached, cached, step)
        new = round((tokens - cached) * self._pair.draft_ratio)
        draft = self.cost("draft").prefill_ms(new, round(cached * self._pair.draft_ratio), draft_step)
        chosen = self._learnt["select"].cost.ms(tokens)
        upper = self.cost("target" if self._pair.stages is None else "upper").prefill_ms(kept, cached, step)
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
        found = {kind: learnt.cost for kind, learnt in self._learnt.items() if learnt.count}
        costs = {kind: [cost.fixed, cost.token, cost.pair] for kind, cost in found.items() if cost.token or cost.fixed}
        try:
            replace_text(self._file, json.dumps(_read(self._file) | {self._key: costs}, indent=1))
        except OSError as error:
            log.warning("the learnt costs could not be kept: %s", error)

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


def read_bytes(model: nn.Module) -> int:
    """Return the bytes of weights that every forward reads. Experts do not count: rows seldom share one."""
    experts = {
        name: module.parameters()
        for name, module in model.named_modules()
        if isinstance(module, (SwitchLinear, QuantizedSwitchLinear))
    }
    return weight_bytes(model) - sum(int(array.nbytes) for _, array in tree_flatten(experts))


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
    try:
        fixed, token, pair = map(float, stored[kind])
    except (KeyError, TypeError, ValueError):
        return None
    usable = all(0 <= value < math.inf for value in (fixed, token, pair)) and fixed + token + pair > 0
    return ForwardCost(fixed, token, pair) if usable else None


_SMALLEST = 64  # tokens of a chunk that requests wait for
_SMALLEST_BACKGROUND = 8  # of idle work, for which a request waits: on a slow CPU 16 tokens can take twice the aim
# Idle work takes this part of what `target_itl_ms` leaves beside a forward's fixed cost: of a hundred chunks, the
# slowest takes one and a half times the median.
_IDLE_PART = 2 / 3
# Beside other requests a chunk is no shorter than what loses this share of its time to the forward's fixed cost.
_FIXED_SHARE = 1 / 3


class ChunkSizer:
    """Sizes chunks for the job whose turn it is. MLX thread only, but for `expected`.

    Alone, a prefill runs in chunks of `EngineConfig.prefill_step`. Beside other requests a chunk takes about
    `target_itl_ms`. It is never so short that a third of its time would be the fixed cost of a forward. One of idle
    work is shorter than that, whatever it loses.

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
        if background:
            most = cost.most_tokens(cost.fixed + _IDLE_PART * (self._target_ms - cost.fixed), depth)
            return min(largest, max(1, most // _SMALLEST_BACKGROUND) * _SMALLEST_BACKGROUND)
        most = cost.most_tokens(self._target_ms, depth) // _SMALLEST * _SMALLEST
        least = math.ceil(cost.fewest_tokens(_FIXED_SHARE, depth) / _SMALLEST) * _SMALLEST
        return min(largest, max(_SMALLEST, most, least))

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
        if isinstance(job, AnswerJob):
            job.sequence.spend(stage, ms)
        if stage == "select":
            self._costs.observe("select", event.total, 0, ms)
        elif reads and tokens <= self._given:  # more than was given out came from the draft's cache
            self._costs.observe(_kind(stage, job), tokens, depth, ms)


def _kind(stage: str, job: Job | None) -> ForwardKind:
    """Return which layers the forwards of a stage run through."""
    if stage == "draft":
        return "draft"
    return "upper" if isinstance(job, AnswerJob) and job.sequence.staged is not None else "target"
