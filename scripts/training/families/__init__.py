"""The architecture families: each a torch network that mirrors mlx-lm's class, its start and its exported form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..network import Network, Sizes
from . import gpt_oss, nemotron_h, qwen3, qwen3_5

__all__ = ["FAMILIES", "Family"]


@dataclass(frozen=True)
class Family:
    """One architecture: `sizes` and `start` are its configuration classes, the rest works on them.

    Attributes:
        build: an empty network of given sizes.
        initialise: fills every parameter, from the start's settings and a seed.
        weights: the parameters under the names that mlx-lm's class gives them.
        config: the content of config.json but for the special tokens.
    """

    sizes: type[Any]
    start: type[Any]
    build: Callable[[Any], Network]
    initialise: Callable[[Any, Any, int], None]
    weights: Callable[[Any], list[tuple[str, Tensor]]]
    config: Callable[[Any], dict[str, object]]


def _family(module: Any) -> Family:
    return Family(module.Sizes, module.Start, module.Network, module.initialise, module.weights, module.config)


FAMILIES = {
    "qwen3": _family(qwen3),
    "qwen3_5": _family(qwen3_5),
    "nemotron_h": _family(nemotron_h),
    "gpt_oss": _family(gpt_oss),
}


def family_of(sizes: Sizes) -> Family:
    """The family that a configuration belongs to."""
    return next(family for family in FAMILIES.values() if type(sizes) is family.sizes)
