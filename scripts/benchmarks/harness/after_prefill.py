"""Decoding after a full and after a sparse prefill of the same prompts, at one and at many rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.nn as nn

from .prefilled import Text, compared_steps, every_fifth_chunk, prefilled

__all__ = ["after_prefill"]

PROMPTS = 4  # different ones, taken in turn
SHORTER = 37  # tokens by which each is shorter than the one before: rows of a batch are seldom of one length


def after_prefill(
    name: str,
    model: nn.Module,
    text: Text,
    context: int,
    rows: Sequence[int],
    tokens: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """One line per number of rows: tokens per second of all of them, and those after sparse over those after full."""
    prompts = [text(seed, context - SHORTER * seed) for seed in range(PROMPTS)]
    kept = [every_fifth_chunk(len(prompt)) for prompt in prompts]
    arms = {
        "full": [prefilled(model, prompt, None) for prompt in prompts],
        "sparse": [prefilled(model, prompt, some) for prompt, some in zip(prompts, kept, strict=True)],
    }
    found = []
    for count in rows:
        compared = compared_steps(model, arms, "full", count, tokens, repeats)
        sparse = compared["sparse"]
        speeds = {f"{arm}_tok_s": 1e3 * count / float(one["step_ms"] or 0) for arm, one in compared.items()}
        head = {"part": "after", "model": name, "context": context, "kept": int(kept[0].size), "rows": count}
        ratio = {"sparse_vs_full": sparse["gain"], "low": sparse["low"], "high": sparse["high"]}
        found.append({**head, **speeds, **ratio, "n": repeats})
    return found
