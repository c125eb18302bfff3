"""The strategies of drafting answers: the table in which each is registered, and what holds for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import mlx.nn as nn

from ..adapters.registry import adapter_for, architecture_of
from ..config import DtypeName, SpeculationName
from ..errors import Refused
from .drafter import Drafter
from .mtp_proposer import MTPProposer
from .ngram import NgramProposer
from .proposer import Models, OwnPart, Proposer
from .rollback import rollback_refusal
from .triforce import TriForceProposer

STRATEGIES: Mapping[SpeculationName, type[Proposer]] = {
    "ngram": NgramProposer,
    "draft": Drafter,
    "triforce": TriForceProposer,
    "mtp": MTPProposer,
}
"""By name. An answer whose strategy is not here decodes plainly."""


def refusal(strategy: SpeculationName, models: Models) -> str | None:
    """Return why a strategy can't run with these models; None if it can."""
    if models.spread:
        return "the target runs on several machines"
    general = adapter_for(architecture_of(models.target)).speculation_refusal
    return general or rollback_refusal(models.target) or STRATEGIES[strategy].refusal(models)


def drafts_with_draft(strategy: SpeculationName) -> bool:
    """Return whether a strategy needs all layers of the pair's draft."""
    kind = STRATEGIES.get(strategy)
    return kind is not None and kind.uses_draft


def load_own_parts(target: nn.Module, folder: Path, dtype: DtypeName) -> dict[str, OwnPart | Refused]:
    """Load what strategies need of the target's files beside the target, by their names."""
    loaded = {name: kind.load(target, folder, dtype) for name, kind in STRATEGIES.items()}
    return {name: part for name, part in loaded.items() if part is not None}
