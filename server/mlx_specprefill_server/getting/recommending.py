"""The pairs of the table that fit a memory; their sizes are computed, see the table's head."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mlx_specprefill import SHAPES, Blueprint, blueprint, find_model, predicted_gain

from .needs import Need

__all__ = ["Recommended", "recommended"]

TABLE = Path(__file__).with_name("recommended.toml")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    shape: tuple[str, Literal["target", "draft"]]
    bits: float = Field(gt=0)
    expert_bits: float | None = Field(default=None, gt=0)

    def need(self) -> Need:
        design = _design(*self.shape)
        experts, parameters = design.expert_parameters, design.parameters
        assert experts is not None
        assert parameters is not None
        weights = (parameters - experts) * self.bits + experts * (self.expert_bits or self.bits)
        return Need(self.id, round(weights / 8), design)


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    target: _Model
    draft: _Model | None = None
    source: str
    measured: str | None = None


@dataclass(frozen=True, slots=True)
class Recommended:
    """A pair of the table.

    Attributes:
        draft: None: the target's own first layers.
        gain: predicted, at the context that was asked for; None where that is beyond the models'.
    """

    target: Need
    draft: Need | None
    gain: float | None
    source: str
    measured: str | None

    def memory(self, tokens: int) -> int:
        """Weights and caches of both, in bytes."""
        return self.target.memory(tokens) + (0 if self.draft is None else self.draft.memory(tokens))

    def facts(self, tokens: int) -> dict[str, Any]:
        """As JSON has it."""
        models = [self.target, *([] if self.draft is None else [self.draft])]
        return {
            "target": self.target.name,
            "draft": None if self.draft is None else self.draft.name,
            "weights": sum(need.weights for need in models),
            "kv_cache": sum(need.cache(tokens) or 0 for need in models),
            "memory": self.memory(tokens),
            "predicted_gain": self.gain,
            "here": all(find_model(need.name) is not None for need in models),
            "source": self.source,
            "measured_by_others": self.measured,
        }


def recommended(memory: int, tokens: int, keep: Fraction) -> list[Recommended]:
    """Those that fit, the largest target first, of equal ones the faster.

    Args:
        memory: bytes for weights and caches.
        tokens: of the context for which there should be room.
    """
    fitting = [pair for pair in _all(tokens, keep) if pair.memory(tokens) <= memory]
    return sorted(fitting, key=lambda pair: (-pair.target.weights, -(pair.gain or 0)))


def _all(tokens: int, keep: Fraction) -> Iterator[Recommended]:
    for row in tomllib.loads(TABLE.read_text(encoding="utf-8"))["pair"]:
        found = _Row.model_validate(row)
        target, draft = found.target.need(), found.draft.need() if found.draft is not None else None
        yield Recommended(target, draft, _gain(target, draft, tokens, keep), found.source, found.measured)


def _gain(target: Need, draft: Need | None, tokens: int, keep: Fraction) -> float | None:
    designs = [need.design for need in (target, draft) if need is not None and need.design is not None]
    if any(tokens > design.context for design in designs):
        return None
    return predicted_gain(designs[0], designs[1] if draft is not None else None, tokens, keep)


@cache
def _design(shape: str, role: str) -> Blueprint:
    return blueprint(getattr(SHAPES[shape], role))
