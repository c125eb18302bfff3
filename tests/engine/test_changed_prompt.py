"""A prompt that changes or lacks text of a cached one keeps the rest beside what the draft chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlx_specprefill import CacheLabel, Engine, GenerationRequest, SpecPrefillOptions
from mlx_specprefill.cache.feeding import feed
from mlx_specprefill.engine.reading import prefill
from tests.engine.prefixes.test_edited_prompt import CONFIG, IN_FULL, LONGER, OLD, PLACE, POLICY, TAIL
from tests.engine.prefixes.test_edited_sparse_prompt import ASKS, SALTED, kept, read, running
from tests.support.tiny import generated, random_prompt, tiny_pair
from tests.support.waiting import eventually

EDGE = 64
NEW = random_prompt(40, 7)
CHANGES = {
    "replaced": (*OLD[:PLACE], *NEW, *OLD[PLACE + 30 :]),
    "one token": (*OLD[:PLACE], NEW[0], *OLD[PLACE + 1 :]),
    "removed": (*OLD[:PLACE], *OLD[PLACE + 200 :]),
    "first": (*NEW, *OLD[200:]),
    "mixed": (*OLD[:PLACE], *NEW, *OLD[PLACE : PLACE + 300], *OLD[PLACE + 400 : 1600], *NEW[:9], *OLD[1700:]),
}
CHANGED = CHANGES["replaced"]
EITHER = pytest.mark.parametrize("prompt", [LONGER, CHANGED], ids=["inserted", "replaced"])


@pytest.fixture
def engine() -> Iterator[Engine]:
    with running(tiny_pair()) as started:
        yield started


class Fed:
    """The prompt indices that the target reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.indices: list[int] = []

        def note(model: Any, cache: Any, tokens: Any, positions: Any, *rest: Any, **more: Any) -> Any:
            self.indices += [] if positions is None else positions.tolist()
            return feed(model, cache, tokens, positions, *rest, **more)

        monkeypatch.setattr(prefill, "feed", note)

    def take(self) -> list[int]:
        indices, self.indices = self.indices, []
        return indices


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_new_and_what_a_sparse_prefill_chooses_is_read_and_all_else_kept(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed, prompt = Fed(monkeypatch), CHANGES[name]
    with running(tiny_pair(), replace(CONFIG, policy=replace(POLICY, reuse=False))) as engine:
        read(engine, OLD, ASKS, IN_FULL)
        chosen = kept(read(engine, prompt, ASKS))
    with running(tiny_pair()) as engine:
        read(engine, OLD, ASKS, IN_FULL)
        fed.take()
        report = read(engine, prompt, ASKS)
    anew = fed.take()
    assert (report.mode, report.reason_code) == ("reuse", "reused")
    assert len(anew) == len(set(anew)) == report.kept_tokens - report.cached_tokens
    assert kept(report) == set(range(len(prompt)))
    front = next(index for index, token in enumerate(prompt) if token != OLD[index])
    assert {index for index in chosen if index >= front} <= set(anew)
    stays = set(range(front, len(prompt))) - set(anew)
    assert len(stays) == report.reused_tokens > len(prompt) / 2
    assert [index for index in stays if index in range(front, front + EDGE)] == []
    runs = {OLD[start : start + 128] for start in range(len(OLD) - 127)}
    known = {
        index
        for start in range(len(prompt) - 127)
        if prompt[start : start + 128] in runs
        for index in range(start, start + 128)
    }
    assert stays <= known
    assert report.draft_tokens > len(prompt) - front - TAIL


def test_a_cached_prompt_that_was_read_in_part_gives_what_is_in_front(engine: Engine) -> None:
    read(engine, OLD, ASKS)
    report = read(engine, CHANGED, ASKS)
    assert report.mode == "sparse"
    assert 0 < report.cached_tokens <= PLACE


def test_the_next_turns_go_on_from_it(engine: Engine) -> None:
    read(engine, OLD, ASKS, IN_FULL)
    prompt = CHANGED
    for seed, again in ((9, 0), (10, 20)):
        assert read(engine, prompt, ASKS).mode == "reuse"
        report = read(engine, (*prompt, *random_prompt(80, seed)), ASKS)
        assert report.mode == "sparse"
        assert report.cached_tokens >= len(prompt) - 1
        prompt = (*prompt[:1200], *random_prompt(30, seed), *prompt[1200 + again :])


@EITHER
@pytest.mark.parametrize(
    "options",
    [SpecPrefillOptions(True), SpecPrefillOptions(None, POLICY.keep_pct), IN_FULL, SpecPrefillOptions(rule="paper")],
)
def test_a_request_that_asks_for_a_way_gets_it(
    options: SpecPrefillOptions, prompt: tuple[int, ...], engine: Engine
) -> None:
    read(engine, OLD, ASKS, IN_FULL)
    assert read(engine, prompt, ASKS, options).mode == ("full" if options is IN_FULL else "sparse")


@EITHER
def test_a_dense_request_and_another_owner_get_nothing_of_it(prompt: tuple[int, ...], engine: Engine) -> None:
    read(engine, OLD, ASKS, IN_FULL)
    assert read(engine, prompt, ASKS).mode == "reuse"
    report = read(engine, prompt, ASKS, IN_FULL)
    assert (report.mode, report.cached_tokens <= PLACE) == ("full", True)
    _, last = generated(engine.generate(GenerationRequest(prompt, 2, label=CacheLabel("bob"))))
    assert last.report.mode == "sparse"


@pytest.mark.parametrize("label", [CacheLabel(), CacheLabel("key")])
def test_where_the_text_may_be_another_ones_it_is_read_as_before(label: CacheLabel, engine: Engine) -> None:
    read(engine, OLD, ASKS, IN_FULL, label)
    assert read(engine, CHANGED, ASKS, label=label).mode == "sparse"
    assert read(engine, LONGER, label=label).mode == "reuse"


def test_what_would_be_read_in_full_is(engine: Engine) -> None:
    """The draft chooses nothing there."""
    read(engine, OLD, ASKS, IN_FULL)
    engine.prefiller.planner._config = replace(CONFIG, policy=replace(POLICY, threshold=9000))
    assert read(engine, CHANGED, ASKS).mode == "full"


@EITHER
@pytest.mark.parametrize(("family", "reuse"), [("llama", False), ("qwen3_5", True), ("gpt_oss", True)])
def test_off_and_with_windows_or_states_it_is_read_as_before(family: str, reuse: bool, prompt: tuple[int, ...]) -> None:
    config = replace(CONFIG, policy=replace(POLICY, reuse=reuse))
    with Engine(tiny_pair(family, family), config) as engine:
        read(engine, OLD, ASKS, IN_FULL)
        assert read(engine, prompt, ASKS).mode == "sparse"


def test_with_quantised_keys(caplog: pytest.LogCaptureFixture) -> None:
    pair = tiny_pair("llama", head_dim=64, hidden_size=64)
    with running(pair, replace(CONFIG, kv_bits=8)) as engine:
        read(engine, OLD, ASKS, IN_FULL)
        assert read(engine, CHANGED, ASKS).mode == "reuse"
        assert engine.stats().fallbacks == {}
    assert "unquantised" not in caplog.text


@EITHER
def test_idle_time_makes_it_dense(prompt: tuple[int, ...]) -> None:
    config = replace(CONFIG, policy=replace(POLICY, densify=True, on_battery=True))
    with running(tiny_pair(), config) as engine:
        read(engine, OLD, ASKS, IN_FULL)
        assert read(engine, prompt, ASKS).mode == "reuse"
        assert eventually(lambda: engine.caches.covers(np.array(prompt[:-1]), SALTED) >= len(prompt) - 2)
