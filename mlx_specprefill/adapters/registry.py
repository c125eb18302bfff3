"""Abilities of mlx-lm's architectures, and why not: sparse prefill, use as a draft, batches, drafted answers.

An architecture is a file in `mlx_lm/models`. `verified.json` holds one row per file, measured by
`scripts/make_support_table.py`, which compares sparse prefill with a masked dense run of the same model. The reasons of
refusals are in `tests/support/refusals.py`. An architecture without a row is refused, never guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import MODEL_REMAPPING

from .depth import full_draft_model


@dataclass(frozen=True, slots=True)
class Adapter:
    """Limits of one architecture.

    Attributes:
        sparse_refusal: why it can't be prefilled sparsely; None if it can.
        draft_refusal: why it can't score a prompt; None if it can.
        depth_refusal: why its first layers can't score alone; None if they can.
        batch_refusal: why it can't decode several sequences in one forward; None if it can.
        speculation_refusal: why it can't verify several tokens in one forward; None if it can.
        absolute: it depends on absolute positions by design, so moving a whole sequence changes its logits.
    """

    sparse_refusal: str | None = None
    draft_refusal: str | None = None
    depth_refusal: str | None = None
    batch_refusal: str | None = None
    speculation_refusal: str | None = None
    absolute: bool = False


@cache
def support_table() -> Mapping[str, Mapping[str, Any]]:
    """Return the rows of `verified.json`: architecture -> refusals (reasons by kind), absolute, error, mlx_lm."""
    rows: dict[str, dict[str, Any]] = json.loads((files(__package__) / "verified.json").read_text(encoding="utf-8"))
    return rows


def adapter_for(model_type: str) -> Adapter:
    """Return the adapter of a `model_type` (or of a file in `mlx_lm/models`). Resolves mlx-lm's aliases."""
    row = support_table().get(MODEL_REMAPPING.get(model_type, model_type))
    if row is None:
        reason = f"architecture {model_type!r} was not verified for sparse prefill"
        return Adapter(reason, reason, reason, reason, reason)
    refusals = {f"{kind}_refusal": reason for kind, reason in row["refusals"].items()}
    return Adapter(**refusals, absolute=row["absolute"])


def architecture_of(model: nn.Module) -> str:
    """Return the file of `mlx_lm/models` that a loaded model comes from; the safest argument for `adapter_for`.

    A checkpoint's `model_type` can be claimed by its own file (`model_file`) or changed by mlx-lm according to
    `architectures`. The instantiated class is certain.
    """
    return type(full_draft_model(model)).__module__.removeprefix("mlx_lm.models.")
