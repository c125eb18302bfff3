"""Lines that are asked behind a prompt take a bounded forward, within the draft's context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill import Engine, EngineConfig, GenerationRequest, ModelPair, PromptSpan, SpecPrefillOptions, keep_pct
from mlx_specprefill.config import SpecPrefillPolicy
from mlx_specprefill.selection.heads import DraftHeads, Head, LineProbe, whole_values
from mlx_specprefill.selection.scorer import HeadScorer
from tests.support.tiny import random_prompt, tiny_pair

CONTEXT = 4096


def pair_of(probed: bool) -> ModelPair:
    pair = tiny_pair(context=CONTEXT)
    weights = np.random.default_rng(0).normal(size=4096).astype(np.float16)
    probe = LineProbe((0,), weights[: 2 * width(pair)].tobytes()) if probed else None
    return replace(pair, heads=DraftHeads((Head(0, 0, 1.0), Head(1, 1, 1.0)), 2, 3, {}, probe))


def width(pair: ModelPair) -> int:
    """Return how many values a token has in the first cache of the draft."""
    assert pair.draft is not None
    cache = make_prompt_cache(pair.draft)
    pair.draft(mx.zeros((1, 2), dtype=mx.int32), cache=cache)
    values = next(whole_values(cache))
    return int(values.shape[0] * values.shape[2])


@pytest.mark.parametrize(("probed", "size", "most"), [(False, 3500, 64), (True, 3700, 198), (True, CONTEXT - 20, 10)])
def test_what_is_asked_is_limited(probed: bool, size: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ask = list[int](), HeadScorer._ask_again

    def noting(self: HeadScorer, draft: Any, end: int, cache: Any, texts: Sequence[Any], each: bool = False) -> Any:
        asked.append(sum(text.size for text in texts))
        return ask(self, draft, end, cache, texts, each)

    monkeypatch.setattr(HeadScorer, "_ask_again", noting)
    spans = (PromptSpan("user", 0, 2, size - 1, size),)
    options = SpecPrefillOptions(True, keep_pct("0.2"))
    with Engine(pair_of(probed), EngineConfig(policy=SpecPrefillPolicy(densify=False))) as engine:
        engine.inspect(GenerationRequest(random_prompt(size), 1, specprefill=options, spans=spans))
    assert all(tokens <= most for tokens in asked)
    assert asked or most < 32
