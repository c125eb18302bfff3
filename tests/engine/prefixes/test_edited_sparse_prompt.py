"""A cached prompt that was read in part, and that a new one inserts text into: what was read stays, so do holes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from mlx_specprefill import (
    CacheLabel,
    Engine,
    EngineConfig,
    Event,
    Finished,
    GenerationRequest,
    ModelPair,
    PrefillReport,
    PromptSpan,
    SpecPrefillOptions,
)
from mlx_specprefill.prefill_report import Prediction
from mlx_specprefill.request import SpanKind
from tests.engine.prefixes.test_edited_prompt import (
    CONFIG,
    IN_FULL,
    INSERTED,
    LONGER,
    OLD,
    PLACE,
    POLICY,
    SEAM,
    TAIL,
    is_read,
)
from tests.engine.test_sessions import Meter, wants
from tests.support.dense import assert_is_full_reading
from tests.support.leaving import events_until
from tests.support.tiny import on_own_layers, random_prompt, tiny_pair
from tests.support.waiting import eventually

ASKS, RESULT = "user", "tool"  # what is new
SALTED = CacheLabel(salt="ours")
DROPPED = range(2336, 2368)  # behind the place: the draft does not look at it at first


def request_of(
    prompt: tuple[int, ...],
    new: str = RESULT,
    options: SpecPrefillOptions | None = None,
    label: CacheLabel = SALTED,
) -> GenerationRequest:
    """Return the request of a turn: a question, a long result, and a last message that may ask."""
    ends = 20, len(prompt) - TAIL, len(prompt)
    starts, kinds = (0, *ends[:-1]), (ASKS, RESULT, new)
    spans = tuple(
        PromptSpan(cast(SpanKind, kind), start, start + 2, end - 2, end)
        for kind, start, end in zip(kinds, starts, ends, strict=True)
    )
    options = options or SpecPrefillOptions(return_spans=True)
    return GenerationRequest(prompt, 2, spans=spans, specprefill=options, label=label)


def read(
    engine: Engine,
    prompt: tuple[int, ...],
    new: str = RESULT,
    options: SpecPrefillOptions | None = None,
    label: CacheLabel = SALTED,
) -> PrefillReport:
    *_, last = engine.generate(request_of(prompt, new, options, label))
    assert isinstance(last, Finished)
    return last.report


def kept(report: PrefillReport) -> set[int]:
    assert report.kept_spans is not None
    return {index for start, end in report.kept_spans for index in range(start, end)}


def inserted(place: int, tokens: tuple[int, ...] = INSERTED, prompt: tuple[int, ...] = OLD) -> tuple[int, ...]:
    return (*prompt[:place], *tokens, *prompt[place:])


@contextmanager
def running(pair: ModelPair, config: EngineConfig = CONFIG) -> Iterator[Engine]:
    """Yield an engine for which the draft costs a tenth of the target, however busy the machine is."""

    def predict(tokens: int, cached: int, kept: int, read: int | None = None, asked: int = 0) -> Prediction:
        drafted = tokens - (cached if read is None else read)
        return Prediction(tokens - cached, drafted / 10 + kept)

    with Engine(pair, config) as started:
        started.prefiller.planner.predict = predict
        for model in ("target", "draft"):
            started._inbox.call(partial(started.prefiller.prefixes.edits.layers, cast(Any, model)))  # feeds some tokens
        yield started


@pytest.fixture
def engine() -> Iterator[Engine]:
    with running(tiny_pair()) as started:
        yield started


@pytest.mark.parametrize("place", [0, 100, PLACE, 1400])
def test_what_was_read_stays_at_its_new_place_and_holes_stay_holes(
    place: int, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = Meter(engine.pair, monkeypatch)
    before = kept(read(engine, OLD))
    meter.take()
    report = read(engine, inserted(place))
    target, draft = meter.take()
    new, behind = set(range(place, place + len(INSERTED))), len(OLD) - TAIL
    moved = {index + len(INSERTED) * (index >= place) for index in before if index < behind}
    assert report.mode == "reuse"
    assert draft == report.draft_tokens == len(INSERTED)
    assert kept(report) == moved | new | set(range(behind + len(INSERTED), len(OLD) + len(INSERTED)))
    held = sum(index >= place for index in before if index < behind)
    assert abs(report.reused_tokens - (1 - SEAM) * held) <= 1
    assert 0 <= target - (report.kept_tokens - report.cached_tokens) <= 2  # the answer's
    assert report.kept_tokens - report.cached_tokens == len(INSERTED) + TAIL + held - report.reused_tokens
    assert report.recalled_tokens == 0


@pytest.mark.parametrize("edit_asks", [True, False])
def test_a_question_recalls_what_was_dropped_behind_the_edit(edit_asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a later one: the draft has followed the edit, so it has little to read."""
    wants(monkeypatch, 1)
    with running(tiny_pair(), replace(CONFIG, policy=replace(POLICY, keep_pct=Fraction(13, 20)))) as engine:
        assert not kept(read(engine, OLD)) & set(DROPPED)
        now, prompt = {index + len(INSERTED) for index in DROPPED}, LONGER
        if not edit_asks:
            assert not kept(read(engine, prompt)) & now
            prompt = (*LONGER, *random_prompt(TAIL, 9))
        wants(monkeypatch, *{index // 32 for index in now})
        report = read(engine, prompt, ASKS)
    assert report.mode == ("reuse" if edit_asks else "sparse")
    assert report.draft_tokens <= len(INSERTED) + 2 * TAIL + 9
    assert report.recalled_tokens > 0
    assert now <= kept(report)
    assert report.kept_tokens < len(prompt)


@pytest.mark.parametrize("edit_asks", [True, False])
def test_a_gap_that_is_filled_in_front_of_an_edit_leaves_no_dense_prefix(
    edit_asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the gap, tokens were read without it. It is filled with the edit, or the turn before."""
    place, gap = 700, range(96, 384)
    wants(monkeypatch, 1, *range(12, 60))
    with running(tiny_pair(), replace(CONFIG, policy=replace(POLICY, keep_pct=Fraction(13, 20)))) as engine:
        assert not kept(read(engine, OLD)) & set(gap)
        wants(monkeypatch, *(index // 32 for index in gap))
        prompt = OLD if edit_asks else (*OLD, *random_prompt(TAIL, 9))
        if not edit_asks:
            assert read(engine, prompt, ASKS).recalled_tokens >= len(gap)
        report = read(engine, inserted(place, prompt=prompt), ASKS)
        assert report.mode == "reuse"
        assert set(gap) <= kept(report)
        assert_is_full_reading(engine, request_of(inserted(place, prompt=prompt)))


def test_a_new_question_chooses_anew_where_most_was_dropped(engine: Engine) -> None:
    read(engine, OLD)
    report = read(engine, LONGER, ASKS)
    assert report.mode == "sparse"
    assert report.cached_tokens <= PLACE


def test_two_edits_in_a_row_keep_what_the_first_one_inserted(engine: Engine) -> None:
    read(engine, OLD)
    first = read(engine, LONGER)
    twice = inserted(1400, random_prompt(50, 11), LONGER)
    report = read(engine, twice)
    assert (first.mode, report.mode) == ("reuse", "reuse")
    assert set(range(PLACE, PLACE + len(INSERTED))) <= kept(report)
    assert set(range(1400, 1450)) <= kept(report)
    assert report.kept_tokens == first.kept_tokens + 50


def test_a_prompt_that_is_read_again_and_the_next_turn_go_on_from_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = Meter(engine.pair, monkeypatch)
    read(engine, OLD)
    first = read(engine, LONGER)
    meter.take()
    longer = (*LONGER, *random_prompt(50, 9))
    for prompt in (LONGER, longer):
        report = read(engine, prompt)
        assert report.mode == "sparse"
        assert report.cached_tokens >= first.kept_tokens - 2
    assert meter.take()[0] <= 60


@pytest.mark.parametrize("options", [None, IN_FULL])
def test_another_insertion_at_the_same_place_may_begin_alike(
    options: SpecPrefillOptions | None, engine: Engine
) -> None:
    read(engine, OLD, options=options)
    for seed in (30, 31):
        assert read(engine, inserted(PLACE, (*INSERTED[:20], *random_prompt(40, seed)))).mode == "reuse"


@pytest.mark.parametrize("options", [None, IN_FULL])
@pytest.mark.parametrize("end", [1500, len(LONGER) - TAIL, len(LONGER) - 5])
def test_a_prompt_that_leaves_it_earlier_has_what_was_inserted(
    end: int, options: SpecPrefillOptions | None, engine: Engine
) -> None:
    read(engine, OLD, options=options)
    first = kept(read(engine, LONGER))
    report = read(engine, (*LONGER[:end], *random_prompt(200, 99)))
    assert report.mode == "sparse"
    assert report.cached_tokens >= len([index for index in first if index < end]) - 1
    assert kept(report) >= set(range(PLACE, PLACE + len(INSERTED)))


def test_a_dense_request_gets_nothing_of_it(engine: Engine) -> None:
    read(engine, OLD)
    assert read(engine, LONGER).mode == "reuse"
    report = read(engine, LONGER, options=IN_FULL)
    assert report.mode == "full"
    assert report.cached_tokens <= PLACE


def test_a_dense_prompt_that_shares_as_much_is_preferred(engine: Engine) -> None:
    read(engine, OLD, options=IN_FULL)
    read(engine, OLD, options=SpecPrefillOptions(True))
    assert read(engine, LONGER).kept_tokens == len(LONGER)


@pytest.mark.parametrize(
    "options", [SpecPrefillOptions(keep_pct=Fraction(1, 4)), SpecPrefillOptions(True, rule="paper")]
)
def test_what_was_chosen_by_another_rule_is_not_gone_on_from(options: SpecPrefillOptions, engine: Engine) -> None:
    read(engine, OLD, options=options)
    assert read(engine, LONGER).mode == "sparse"


def test_the_targets_own_first_layers_are_a_draft_as_any() -> None:
    with running(on_own_layers(tiny_pair(), 2)) as engine:
        read(engine, OLD)
        assert read(engine, LONGER).mode == "reuse"
        assert engine.stats().fallbacks == {}


def test_with_quantised_keys() -> None:
    with running(tiny_pair("llama", head_dim=64, hidden_size=64), replace(CONFIG, kv_bits=8)) as engine:
        read(engine, OLD)
        assert read(engine, LONGER).mode == "reuse"
        assert read(engine, (*LONGER, *random_prompt(50, 9))).mode == "sparse"
        assert engine.stats().fallbacks == {}


def test_given_up_on_the_way_all_is_as_before(engine: Engine) -> None:
    read(engine, OLD)
    alone = kept(read(engine, inserted(PLACE, random_prompt(40, 8))))
    given_up = events_until(engine, request_of(LONGER), is_read)[-1].report
    assert given_up.mode == "reuse"
    assert given_up.reached is not None
    assert given_up.recalled_tokens == 0
    report = read(engine, LONGER)
    assert report.mode == "reuse"
    assert kept(report) == alone


@pytest.mark.extended
def test_edits_at_once_do_not_disturb_each_other(engine: Engine) -> None:
    read(engine, OLD)
    prompts = [inserted(place, random_prompt(40, place)) for place in (300, 900, 1300)]
    with ThreadPoolExecutor(3) as pool:
        ends = list(pool.map(lambda prompt: [*engine.generate(request_of(prompt))][-1], prompts))
    for prompt, end in zip(prompts, ends, strict=True):
        with running(tiny_pair()) as other:
            read(other, OLD)
            *_, alone = other.generate(request_of(prompt))
        assert isinstance(end, Finished)
        assert isinstance(alone, Finished)
        assert (end.report.mode, kept(end.report)) == ("reuse", kept(alone.report))


def test_idle_time_makes_it_dense() -> None:
    with running(tiny_pair(), replace(CONFIG, policy=replace(POLICY, densify=True, on_battery=True))) as engine:
        first, events = request_of(OLD), list[Event]()
        engine.submit(first, lambda _: None)
        engine.submit(request_of(LONGER), events.append)
        eventually(lambda: bool(events) and isinstance(events[-1], Finished))
        eventually(lambda: engine.caches.covers(np.array(LONGER[:-1]), first.label) >= len(LONGER) - 2)


def test_it_is_not_gone_on_from_where_a_sparse_prefill_is_sooner(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no closer to full reading than a sparse prefill, so it has to be as soon."""
    read(engine, OLD)

    def predicted(tokens: int, cached: int, *_: object, **__: object) -> Prediction:
        return Prediction(10_000.0, 4000.0 if cached > PLACE else 3000.0)

    monkeypatch.setattr(engine.prefiller.planner, "predict", predicted)
    assert read(engine, LONGER).mode == "sparse"
