"""Milliseconds of forwards on this machine, learnt from those that ran, and the predicted times of both prefills.

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
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from typing import Any, Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..._files import read_object, replace_text
from ...cache.feeding import TAIL
from ...cache.positioned import leaves
from ...cache.prefix.identity import model_identity
from ...config import DraftWindow, EngineConfig
from ...pair import ModelPair
from ...prefill_report import Prediction
from ..prefixes.caches import draft_window

log = logging.getLogger(__name__)
ForwardKind = Literal["draft", "target", "select"]
"""The draft, the target, and the selection of tokens."""
_REMEMBERED = 96  # forwards
_HALF_LIFE = 12  # forwards after which an observation counts half, to follow a machine that becomes busy
_LEAST_TOKENS = 8  # shorter forwards are not timed
_ROUNDS = 12
_EXACT = 1e-3  # relative error below which observations count alike
_RECENT_S = 300.0  # seconds within which a steady cost neither doubles nor halves
_TYPICAL = (1024, 4096)  # tokens and depth of a forward by which that is seen
_KNOWN = 12  # forwards after which a cost is relied on: idle work moves it no more
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
_USED_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")


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
        self._past: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)  # when the cost changed, and to what
        self.cost = prior
        self.count = 0

    @property
    def speed(self) -> float | None:
        """Return the machine's slowness relative to the prior; None without observations or a prior."""
        priors = [(seen.ms, self._prior.ms(seen.tokens, seen.depth)) for seen in tuple(self._seen)]
        ratios = [ms / prior for ms, prior in priors if prior > 0]
        return statistics.median(ratios) if ratios else None

    @property
    def is_steady(self) -> bool:
        """Return whether the cost has neither doubled nor halved within the last minutes. May be called anywhere."""
        since = time.monotonic() - _RECENT_S
        recent = [ms for at, ms in tuple(self._past) if at > since]
        return not recent or max(recent) < 2 * min(recent)

    def assume(self, known: ForwardCost) -> None:
        """Replace the prior by what an earlier start has learnt, unless there are observations."""
        if not self._seen:
            self._prior = self.cost = known
            self._note()

    def _note(self) -> None:
        self._past.append((time.monotonic(), self.cost.ms(*_TYPICAL)))

    def observe(self, tokens: int, depth: int, ms: float) -> None:
        """Learn that a forward over `tokens` behind `depth` others took `ms`."""
        if tokens < _LEAST_TOKENS or ms <= 0:
            return
        self._seen.append(_Forward(tokens, depth, ms))
        self.count += 1
        if self.count < _HALF_LIFE or abs(self.cost.ms(tokens, depth) / ms - 1) > _AGREES:
            self.cost = self._fit()
            if self._past or self.count >= _KNOWN // 2:  # the first ones only correct a prior that was not measured
                self._note()

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
        draft = ForwardCost(0, 0, 0)
        if pair.draft is not None:
            draft = prior_cost(pair.draft, pair.draft_config or {}, draft_window(pair, config))
        priors: dict[ForwardKind, ForwardCost] = {
            "draft": draft,
            "target": target,
            "select": ForwardCost(0, 0, 0),
        }
        self._learnt = {kind: LearntCost(prior) for kind, prior in priors.items()}
        self._pair = pair
        self._stored = 0  # observations at the latest `store`
        self._measured: set[ForwardKind] = set()  # kinds that earlier starts have measured

    def cost(self, kind: ForwardKind) -> ForwardCost:
        """Return the cost of one forward. A kind that never ran deviates from its prior as the others do."""
        learnt = self._learnt[kind]
        if learnt.count:
            return learnt.cost
        speeds = [
            speed for other in self._learnt.values() if (speed := other.speed) is not None and other is not learnt
        ]
        return learnt.cost.scale(statistics.median(speeds)) if speeds else learnt.cost

    @property
    def are_measured(self) -> bool:
        """Return whether forwards of both models have been timed on this machine, now or before an earlier end."""
        kinds: tuple[ForwardKind, ...] = ("target", "draft") if self._pair.has_draft else ("target",)
        return all(self._learnt[kind].count or kind in self._measured for kind in kinds)

    def is_known(self, kind: ForwardKind) -> bool:
        """Return whether enough of these forwards were timed, now or before an earlier end."""
        return kind in self._measured or self._learnt[kind].count >= _KNOWN

    def observe(self, kind: ForwardKind, tokens: int, depth: int, ms: float) -> None:
        """Learn from a forward. MLX thread only."""
        self._learnt[kind].observe(tokens, depth, ms)

    def predict(
        self, tokens: int, kept: int, cached: int, steps: tuple[int, int], read: int, asked: int = 0
    ) -> Prediction:
        """Return the times of both ways to continue a prompt. May be called from any thread.

        Args:
            tokens: length of the whole prompt.
            kept: tokens of the uncached rest that the target would see.
            cached: prompt tokens that the target's cache holds.
            steps: tokens per forward of target and draft.
            read: prompt tokens that the draft's cache holds.
            asked: tokens of questions, which both models read behind the prompt.
        """
        target, of_draft, ratio = self.cost("target"), self.cost("draft"), self._pair.draft_ratio
        full = target.prefill_ms(tokens - cached, cached, steps[0]) + target.prefill_ms(asked, tokens, steps[0])
        draft = of_draft.prefill_ms(round((tokens - read) * ratio), round(read * ratio), steps[1])
        draft += of_draft.prefill_ms(round(asked * ratio), round(tokens * ratio), steps[1])
        chosen = target.prefill_ms(kept, cached, steps[0]) + target.prefill_ms(asked, cached + kept, steps[0])
        steady = self._learnt["target"].is_steady and self._learnt["draft"].is_steady
        return Prediction(full, draft + self._learnt["select"].cost.ms(tokens) + chosen, steady)

    # --- between starts ----------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Load the stored costs of these models on this machine. MLX thread only."""
        if self._file is None:
            return
        stored = read_object(self._file).get(self._key)
        for kind, learnt in self._learnt.items():
            if (known := _stored_cost(stored, kind)) is not None:
                learnt.assume(known)
                self._measured.add(kind)

    def store(self) -> None:
        """Store new observations for the next start. MLX thread only."""
        count = sum(learnt.count for learnt in self._learnt.values())
        if self._file is None or count == self._stored:
            return
        self._stored = count
        found = {kind: learnt.cost for kind, learnt in self._learnt.items() if learnt.count}
        costs = {kind: [cost.fixed, cost.token, cost.pair] for kind, cost in found.items() if cost.token or cost.fixed}
        stored = read_object(self._file)
        if isinstance(before := stored.get(self._key), dict):  # what did not run this time is still known
            costs = before | costs
        try:
            replace_text(self._file, json.dumps(stored | {self._key: costs}, indent=1))
        except OSError as error:
            log.warning("the learnt costs could not be kept: %s", error)

    @property
    def _key(self) -> str:
        pair = self._pair
        models = [model_identity(pair.target, pair.target_config)]
        if pair.draft is not None:
            models.append(model_identity(pair.draft, pair.draft_config or {}))
        return ":".join(("chunks", *models, _device(), version("mlx")))


def _device() -> str:
    """Return the device, its name and the threads of its BLAS."""
    name = mx.device_info().get("device_name") or platform.machine()
    threads = os.environ.get("OPENBLAS_NUM_THREADS") or os.cpu_count()
    return f"{mx.default_device()}:{name}:{threads}"


def prior_cost(model: nn.Module, config: Mapping[str, Any], window: DraftWindow | None = None) -> ForwardCost:
    """Return the cost estimated from a model's work: active parameters, and attention by layer.

    Args:
        config: its config.json.
        window: within which it reads, so that each token has a like number of pairs; None: it sees everything.
    """
    text = {**config, **config.get("text_config", {})}
    active, experts = _active_parameters(model, text)
    rate = _PRIOR_RATE["gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"] / 1e3  # per millisecond
    token = 2 * active / rate
    width = int(text.get("num_attention_heads", 1)) * int(text.get("head_dim") or 128)
    attending = sum(isinstance(part, KVCache) for part in leaves(make_prompt_cache(model)))
    fixed = _PRIOR_FIXED_MOE if experts else _PRIOR_FIXED_DENSE
    pair = 4 * width * attending / rate
    if window is None:
        return ForwardCost(fixed * token, token, pair)
    return ForwardCost(fixed * token, token + pair * (window.sinks + window.tokens + window.block / 2), 0.0)


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


def _elements(module: nn.Module) -> int:
    bits = int(getattr(module, "bits", 32))  # packed weights are counted in words of 32 bits
    return int(module.weight.size) * 32 // bits


def _stored_cost(stored: Any, kind: str) -> ForwardCost | None:
    """Return a stored cost; None if it is missing or malformed."""
    try:
        fixed, token, pair = map(float, stored[kind])
    except (KeyError, TypeError, ValueError):
        return None
    usable = all(0 <= value < math.inf for value in (fixed, token, pair)) and fixed + token + pair > 0
    return ForwardCost(fixed, token, pair) if usable else None
