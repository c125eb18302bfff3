"""The ranks of one model plan alike, whatever each has learnt of times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from mlx_specprefill import EngineConfig, GenerationRequest, SpecPrefillPolicy
from mlx_specprefill.engine.ranked import RankedCaches, RankedPrefiller
from mlx_specprefill.engine.reading.costs import CostModel
from tests.support.tiny import random_prompt, tiny_pair

CONFIG = EngineConfig(policy=SpecPrefillPolicy(threshold=None, min_saving_ms=1.0))


class Together:
    """Rank 0 and another one, which hears what rank 0 has said."""

    def __init__(self, said: list[tuple[str, Any]], leads: bool) -> None:
        self.said, self.leads = said, leads

    def broadcast(self, what: str, read: Callable[[], Any]) -> Any:
        if self.leads:
            self.said.append((what, read()))
            return self.said[-1][1]
        told, heard = self.said.pop(0)
        assert told == what
        return heard


def prefiller(ranks: Any, draft_ms: float, target_ms: float = 1.0) -> RankedPrefiller:
    """A rank's that has seen target and draft take so much per token."""
    pair = replace(tiny_pair(), ranks=ranks)
    costs = CostModel(pair, CONFIG)
    for _ in range(20):
        for tokens in (64, 256):
            costs.observe("target", tokens, 0, target_ms * tokens)
            costs.observe("draft", tokens, 0, draft_ms * tokens)
    caches = RankedCaches(ranks, pair, replace(CONFIG, prefix_cache_bytes=0))
    chunks: Any = SimpleNamespace(size=lambda stage: 512, expected_tokens=lambda stage: 512)
    return RankedPrefiller(ranks, pair, CONFIG, caches, costs, chunks)


def test_the_plan_behind_a_cached_prefix_is_rank_0s() -> None:
    said: list[tuple[str, Any]] = []
    first, other = prefiller(Together(said, True), 0.01), prefiller(Together(said, False), 10.0)
    request = GenerationRequest(random_prompt(2000), 2)
    submitted = first.planner.plan(request)
    assert (submitted.mode, other.planner.plan(request).mode) == ("sparse", "full")  # each by itself
    decided = first.planner.decide(request, submitted)
    assert decided[0].mode == "sparse"
    assert other.planner.decide(request, submitted) is decided
