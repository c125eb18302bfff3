"""The way of a request: all behind a dense prefix, all behind a sparse one, or the kept tokens."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_specprefill import GenerationRequest
from mlx_specprefill.cache.held import HeldTokens
from mlx_specprefill.cache.prefix.nodes import CacheHit
from mlx_specprefill.engine.active_request import ActiveRequest, Way
from mlx_specprefill.engine.densify import READ_ALL
from mlx_specprefill.engine.job import AnswerJob
from mlx_specprefill.specprefill.plan import PrefillPlan

FULL = READ_ALL.as_full("threshold", "20 uncached prompt tokens, threshold 8192")
SPARSE = PrefillPlan("sparse", FULL.reason, FULL.keep, FULL.forced)
ALL, HELD = HeldTokens.all(6), HeldTokens.of(np.array([0, 1, 5, 2], dtype=np.int32))  # the last one was recalled


@pytest.mark.parametrize(
    ("plan", "held", "way", "code", "mode"),
    [
        (FULL, ALL, "full", "threshold", "full"),
        (FULL, HELD, "extend", "extended", "sparse"),
        (SPARSE, ALL, "sparse", "threshold", "sparse"),
        (SPARSE, HELD, "sparse", "threshold", "sparse"),
    ],
)
def test_the_way_follows_from_plan_and_prefix(
    plan: PrefillPlan, held: HeldTokens, way: Way, code: str, mode: str
) -> None:
    active = ActiveRequest(1, GenerationRequest(tuple(range(20)), 1), plan)
    active.resume(CacheHit(6, [], held))
    active.decide(plan)
    report = active.report()
    assert (active.way, active.plan.reason.code) == (way, code)
    assert (report.mode, report.reason_code) == (mode, code)
    assert report.cached_tokens == held.size


def test_an_extended_turn_says_how_much_is_new() -> None:
    active = ActiveRequest(1, GenerationRequest(tuple(range(20)), 1), FULL)
    active.resume(CacheHit(6, [], HELD))
    active.decide(FULL)
    assert active.plan.reason.words == f"14 new tokens are read whole behind an earlier turn: {FULL.reason.words}"


def test_nothing_is_found_yet_at_the_start() -> None:
    active = ActiveRequest(1, GenerationRequest((1, 2), 1), SPARSE)
    assert (active.way, active.prefix.tokens, active.tokens_seen, active.is_sparse) == (None, 0, 2, False)
    assert AnswerJob(1, iter(()), active=active).tokens_cached == 0
