"""A request in work: its report of the prefill, and its reading where less is cached than was found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlx_specprefill import Engine, EngineConfig, GenerationRequest, SpecPrefillOptions, SpecPrefillPolicy
from mlx_specprefill.cache.held import HeldTokens
from mlx_specprefill.cache.prefix.nodes import CacheHit
from mlx_specprefill.engine.prefixes.lookup import Prefix
from mlx_specprefill.engine.reading.densify import READ_ALL
from mlx_specprefill.engine.requests.active_request import ActiveRequest
from mlx_specprefill.engine.requests.job import AnswerJob
from mlx_specprefill.selection.plan import PrefillPlan
from tests.support.tiny import generated, random_prompt, tiny_pair

FULL = READ_ALL.as_full("threshold", "20 uncached prompt tokens, threshold 8192")
SPARSE = PrefillPlan("sparse", FULL.reason, FULL.keep, FULL.forced)
ALL, HELD = HeldTokens.all(6), HeldTokens.of(np.array([0, 1, 5, 2], dtype=np.int32))  # the last one was recalled
BEHIND = np.arange(6, 20, dtype=np.int32)


def begun(plan: PrefillPlan, held: HeldTokens) -> ActiveRequest:
    return ActiveRequest(1, GenerationRequest(tuple(range(20)), 1), plan, prefix=Prefix(6, held))


@pytest.mark.parametrize(
    ("plan", "held", "mode"),
    [(FULL, ALL, "full"), (FULL, HELD, "sparse"), (SPARSE, ALL, "sparse"), (SPARSE, HELD, "sparse")],
)
def test_it_is_sparse_by_its_plan_or_behind_a_sparse_prefix(plan: PrefillPlan, held: HeldTokens, mode: str) -> None:
    active = begun(plan, held)
    assert not active.is_sparse  # nothing is chosen yet
    active.resume(CacheHit(6, [], held), BEHIND)
    report = active.report()
    assert (report.mode, active.is_sparse) == (mode, mode == "sparse")
    assert report.cached_tokens == held.size
    assert report.kept_tokens == held.size + BEHIND.size
    assert active.reading is BEHIND


@pytest.mark.parametrize("left", [HeldTokens(), HeldTokens.all(3), HeldTokens.of(np.array([0, 1], dtype=np.int32))])
@pytest.mark.parametrize("found", [ALL, HELD])
def test_what_was_found_and_is_gone_is_read(found: HeldTokens, left: HeldTokens) -> None:
    active = begun(FULL, found)
    active.resume(CacheHit(left.end, [], left), BEHIND)
    assert active.prefix.length == left.end
    wanted = {*found.positions.tolist(), *BEHIND.tolist()}
    assert set(active.reading.tolist()) == wanted - set(left.positions.tolist())
    assert (np.diff(active.reading) > 0).all()


def test_nothing_is_found_yet_at_the_start() -> None:
    active = ActiveRequest(1, GenerationRequest((1, 2), 1), SPARSE)
    assert (active.prefix.length, active.tokens_seen, active.is_sparse) == (0, 2, False)
    assert AnswerJob(1, iter(()), active=active).tokens_cached == 0


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gpt_oss"])
@pytest.mark.parametrize("enabled", [None, False])
def test_what_is_evicted_while_the_draft_reads_is_read_again(
    family: str, enabled: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target sees the same tokens as if the prefix were still there."""
    config = EngineConfig(policy=SpecPrefillPolicy(threshold=100, densify=False), prefill_step=64)
    first, second = random_prompt(500), (*random_prompt(500), *random_prompt(300, 3))
    reports = []
    for evicted in (False, True):
        with Engine(tiny_pair(family, family), config) as engine:
            options = SpecPrefillOptions(enabled, return_spans=True)
            generated(engine.generate(GenerationRequest(first, 2, specprefill=options)))
            if evicted:
                find = engine.prefiller.planner.decide

                def find_and_forget(*given: Any, find: Any = find, engine: Engine = engine) -> Any:
                    found = find(*given)
                    engine.caches.clear()
                    return found

                monkeypatch.setattr(engine.prefiller.planner, "decide", find_and_forget)
            _, last = generated(engine.generate(GenerationRequest(second, 2, specprefill=options)))
            assert engine.stats().fallbacks == {}
            reports.append(last.report)
    kept, again = reports
    assert (again.mode, again.kept_spans, again.kept_tokens) == (kept.mode, kept.kept_spans, kept.kept_tokens)
    assert kept.cached_tokens > 0 == again.cached_tokens
