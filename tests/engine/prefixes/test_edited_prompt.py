"""A prompt that edits a cached one keeps what follows the edit, and reads the new text and a part of the old anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Event,
    Finished,
    GenerationRequest,
    PrefillReport,
    Progress,
    PromptSpan,
    SpecPrefillOptions,
    SpecPrefillPolicy,
)
from mlx_specprefill.adapters.moved_keys import Piece
from mlx_specprefill.cache.held import HeldTokens
from mlx_specprefill.cache.prefix.nodes import common_length
from mlx_specprefill.engine.prefixes import edited_prefix, edits
from mlx_specprefill.engine.prefixes.edited_prefix import Edit, EditedPrefixes
from mlx_specprefill.engine.prefixes.edits import kept_passages
from mlx_specprefill.engine.reading import prefill
from mlx_specprefill.engine.reading.densify import READ_ALL
from mlx_specprefill.engine.reading.planner import pays_around
from mlx_specprefill.prefill_report import Mode, Prediction
from tests.engine.test_sessions import Meter
from tests.support.leaving import events_until
from tests.support.tiny import generated, on_own_layers, random_prompt, tiny_pair

OLD = random_prompt(2600)
PLACE, TAIL, SHARE, SEAM = 600, 64, Fraction(1, 5), Fraction(1, 10)
INSERTED = random_prompt(40, 7)
LONGER = (*OLD[:PLACE], *INSERTED, *OLD[PLACE:])
POLICY = SpecPrefillPolicy(threshold=300, keep_pct=SHARE, densify=False)
CONFIG = EngineConfig(policy=POLICY, prefill_step=128, prefix_cache_bytes=64 << 20)
IN_FULL = SpecPrefillOptions(False)


def events_of(engine: Engine, prompt: tuple[int, ...], options: SpecPrefillOptions | None = None) -> list[Event]:
    spans = (PromptSpan("user", 0, 4, len(prompt) - 10, len(prompt)),)
    return [*engine.generate(GenerationRequest(prompt, 2, spans=spans, specprefill=options or SpecPrefillOptions()))]


def read(engine: Engine, prompt: tuple[int, ...], options: SpecPrefillOptions | None = None) -> PrefillReport:
    *_, last = events_of(engine, prompt, options)
    assert isinstance(last, Finished)
    return last.report


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(tiny_pair(), CONFIG) as running:
        yield running


def test_the_new_text_the_seam_and_the_end_are_read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    meter, prompt = Meter(engine.pair, monkeypatch), LONGER
    read(engine, OLD, IN_FULL)
    for model in ("target", "draft"):
        engine._inbox.call(
            partial(engine.prefiller.prefixes.edits.layers, cast(Any, model))
        )  # feeds some tokens of its own
    meter.take()
    report = read(engine, prompt)
    target, draft = meter.take()
    behind = len(OLD) - PLACE - TAIL
    assert report.mode == "reuse"
    assert report.reason_code == "reused"
    assert abs(report.reused_tokens - (1 - SEAM) * behind) <= 2
    assert report.cached_tokens == PLACE + report.reused_tokens
    assert 0 <= target - (len(prompt) - report.cached_tokens) <= 2  # the answer's
    assert draft == 0
    assert report.kept_tokens == len(prompt)
    told = report.to_dict()
    assert (told["reused_tokens"], told["read_tokens"]) == (report.reused_tokens, len(prompt) - report.cached_tokens)


def test_progress_ends_at_what_the_target_sees(engine: Engine) -> None:
    read(engine, OLD, IN_FULL)
    longer = (*LONGER, *random_prompt(50, 9))
    for prompt, mode in ((LONGER, "reuse"), (longer, "sparse"), (random_prompt(900, 5), "sparse")):
        events = events_of(engine, prompt)
        last = events[-1]
        assert isinstance(last, Finished)
        assert last.report.mode == mode
        steps = [event for event in events if isinstance(event, Progress) and event.stage == "prefill"]
        assert {(step.cached, step.total) for step in steps} == {
            (last.report.cached_tokens, last.report.kept_tokens - last.report.cached_tokens)
        }
        assert steps[-1].done == steps[-1].total


def test_several_insertions(engine: Engine) -> None:
    read(engine, OLD, IN_FULL)
    prompt = (*OLD[:PLACE], *INSERTED, *OLD[PLACE : PLACE + 900], *INSERTED, *OLD[PLACE + 900 :])
    assert read(engine, prompt).reused_tokens == 810 + int((len(OLD) - PLACE - 900 - TAIL) * (1 - SEAM))


@pytest.mark.parametrize("copied", [slice(PLACE, PLACE + 300), slice(1500, 1700), slice(100, 400)])
def test_what_is_inserted_may_repeat_text_of_the_prompt(copied: slice, engine: Engine) -> None:
    read(engine, OLD, IN_FULL)
    report = read(engine, (*OLD[:PLACE], *INSERTED, *OLD[copied], *INSERTED, *OLD[PLACE:]))
    assert report.mode == "reuse"
    assert report.reused_tokens >= (1 - SEAM) * (len(OLD) - PLACE - TAIL) - 2


def test_the_report_says_how_long_it_was_to_take_and_what_was_read_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(engine, OLD, IN_FULL)
    monkeypatch.setattr(
        engine.prefiller.planner, "predict", lambda tokens, cached, *_, **__: Prediction(tokens - cached, 10_000.0)
    )
    report = read(engine, LONGER)
    assert report.mode == "reuse"
    assert report.predicted == Prediction(len(LONGER) - PLACE, len(LONGER) - report.cached_tokens)
    assert abs(report.miss.read_tokens - (len(OLD) - PLACE - report.reused_tokens)) <= 2


@pytest.mark.parametrize(
    ("front", "added", "behind", "kept"),
    [
        ("the limit is 30", "0", " seconds. ", False),
        ("the limit is ", "1", "30 seconds. ", False),
        ("it is ", "un", "safe. ", False),
        ("it is safe. ", "Not now. ", "There it is. ", True),
        ("it is safe. The", "n we go. The", "re it is. ", True),
        ("it is", ", they say,", " safe. ", True),
        ("", "This is new. ", "There it is. ", True),
    ],
)
def test_an_insertion_that_makes_another_word_is_a_change(front: str, added: str, behind: str, kept: bool) -> None:
    pair = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: "".join(map(chr, ids))))
    words = " ".join(f"word{n}" for n in random_prompt(300))
    old, new = (
        np.array([*map(ord, text)], dtype=np.int32) for text in (front + behind + words, front + added + behind + words)
    )
    edit = EditedPrefixes(cast(Any, pair), cast(Any, None))._edit(new, old, HeldTokens.all(old.size))
    assert (edit.reused > 1000) is kept


def test_the_next_turn_goes_on_from_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(engine.pair, monkeypatch)
    read(engine, OLD, IN_FULL)
    read(engine, LONGER)
    meter.take()
    report = read(engine, (*LONGER, *random_prompt(50, 9)))
    assert report.mode == "sparse"  # the target still sees some of it as it was read before the edit
    assert meter.take()[0] <= 60


def test_after_other_edits_the_cached_prompt_is_still_found(engine: Engine) -> None:
    """Each edit leaves a sparse prefix, which was used later."""
    read(engine, OLD, IN_FULL)
    for seed in range(4):
        assert read(engine, (*OLD[:PLACE], *random_prompt(40, 20 + seed), *OLD[PLACE:])).mode == "reuse"
    again = (*OLD[:PLACE], *random_prompt(40, 20), *OLD[PLACE:1400], *INSERTED, *OLD[1400:])
    assert read(engine, again).mode == "reuse"


def test_a_late_tool_is_read_alone_where_no_tool_may_be_dropped(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        engine.prefiller.planner, "predict", lambda tokens, cached, *_, **__: Prediction(9.0 * (tokens - cached), 1e9)
    )

    def answered(prompt: tuple[int, ...]) -> PrefillReport:
        front = len(prompt) - 100
        spans = (PromptSpan("tools", 0, 4, front, front), PromptSpan("user", front, front + 4, front + 90, len(prompt)))
        _, last = generated(engine.generate(GenerationRequest(prompt, 2, spans=spans)))
        return last.report

    assert answered(OLD).reason_code == "forced"
    assert answered(LONGER).mode == "reuse"


def test_given_up_on_the_way_it_says_what_was_read(engine: Engine) -> None:
    read(engine, OLD, IN_FULL)
    report = events_until(engine, GenerationRequest(LONGER, 2), is_read)[-1].report
    assert report.mode == "reuse"
    assert report.reached is not None
    assert 0 < report.to_dict()["read_tokens"] == report.kept_tokens - report.cached_tokens < 300
    assert read(engine, LONGER).mode == "reuse"


def is_read(event: Event) -> bool:
    return isinstance(event, Progress) and event.stage == "prefill"


@pytest.mark.parametrize("failing", ["move", "feed"])
def test_a_failure_on_the_way_is_read_in_full(failing: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    read(engine, OLD, IN_FULL)

    module: Any = edited_prefix if failing == "move" else prefill
    calls, original = list[str](), getattr(module, failing)

    def fail_once(*args: Any, **more: Any) -> Any:
        calls.append(failing)
        if len(calls) == 1:
            raise RuntimeError("no")
        return original(*args, **more)

    monkeypatch.setattr(module, failing, fail_once)
    report = read(engine, LONGER)
    assert (report.mode, report.reason_code) == ("full", "fallback")
    assert (report.cached_tokens, report.reused_tokens) == (0, 0)
    assert read(engine, LONGER, IN_FULL).cached_tokens == len(LONGER) - 1


def test_behind_the_targets_own_layers_and_with_quantised_keys(caplog: pytest.LogCaptureFixture) -> None:
    quantisable = tiny_pair("llama", head_dim=64, hidden_size=64)
    for pair, config in ((on_own_layers(tiny_pair(), 2), CONFIG), (quantisable, replace(CONFIG, kv_bits=8))):
        with Engine(pair, config) as running:
            read(running, OLD, IN_FULL)
            assert read(running, LONGER).mode == "reuse"
            assert read(running, (*LONGER, *random_prompt(50, 9))).mode != "full"
            assert running.stats().fallbacks == {}
    assert "unquantised" not in caplog.text


@pytest.mark.parametrize(
    ("mode", "sparse_ms", "ms", "pays"),
    [
        ("sparse", 1000, 4999, True),  # half of full reading
        ("sparse", 1000, 5001, False),
        ("sparse", 6000, 5999, True),  # no more than the sparse prefill
        ("full", 9900, 7900, True),  # a fifth is saved, and a second
        ("full", 9900, 8100, False),
    ],
)
def test_it_has_to_be_soon(
    mode: Mode, sparse_ms: float, ms: float, pays: bool, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = engine.prefiller.planner
    monkeypatch.setattr(planner, "predict", lambda *_: Prediction(ms, 0.0))
    plan = replace(READ_ALL, mode=mode, predicted=Prediction(10_000.0, sparse_ms))
    tokens = np.arange(2000, dtype=np.int32)
    piece = Piece(600, 700, 1400)
    edit = Edit(tokens, HeldTokens.all(2000), 2300, 600, (piece,), (piece,), tokens[500:700], tokens[:200], 1400)
    predicted = planner._predict_edit(GenerationRequest(random_prompt(2300), 2), edit, plan.predicted)
    assert pays_around(edit, plan, predicted, POLICY) is pays


@pytest.mark.parametrize("seed", range(20))
def test_passages_follow_each_other_in_both_texts_and_are_as_long_as_they_agree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 3 if seed % 2 else 1000, 3000).astype(np.int32)
    parts = np.split(old, np.sort(rng.choice(np.arange(1, 3000), 5, replace=False)))
    added, more = rng.integers(0, 1000, 50), rng.integers(0, 1000, 9)
    new = np.concatenate([parts[0], added, *parts[1:3], more, parts[3], parts[5]]).astype(np.int32)
    start = common_length(new, old)
    found = kept_passages(new, old, start)
    place, end = start, start
    for passage in found:
        assert passage.old >= end
        assert passage.new >= place
        place, end = passage.new + passage.size, passage.old + passage.size
        assert (new[passage.new : place] == old[passage.old : end]).all()
        assert passage.size >= 128
        assert place == new.size or end == old.size or new[place] != old[end]
    wanted = [np.concatenate(parts[1:3]).size, parts[3].size, parts[5].size]
    if not seed % 2:  # text that does not repeat itself
        assert abs(sum(passage.size for passage in found) - sum(size for size in wanted if size >= 128)) <= 12


def test_texts_without_a_common_run_share_nothing() -> None:
    one, other = np.arange(400, dtype=np.int32), np.arange(1000, 1400, dtype=np.int32)
    assert kept_passages(one, other, 0) == []
    assert kept_passages(one[:5], one, 0) == []
    assert kept_passages(one, np.append(other, one), 0) == [Piece(old=400, new=0, size=400)]
    assert kept_passages(np.append(other, one), one, 0) == [Piece(old=0, new=400, size=400)]


@given(st.integers(0, 1 << 32), st.booleans())
def test_an_edit_keeps_what_sets_say(seed: int, is_chosen: bool) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 1000, 2000).astype(np.int32)
    new = np.insert(old, np.sort(rng.integers(1, 1900, rng.integers(1, 6))), 1000)
    tokens = np.sort(rng.choice(old.size, rng.integers(100, 2000), replace=False)).astype(np.int32)
    held = HeldTokens.of(np.append(tokens[20:], tokens[:20]))  # some of them recalled
    chosen = np.sort(rng.choice(new.size, 300, replace=False)).astype(np.int32) if is_chosen else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EditedPrefixes, "_is_change", lambda *_: False)
        edit = EditedPrefixes(cast(Any, None), cast(Any, None))._edit(new, old, held, chosen)
    start = common_length(new, old)
    pieces, unread, reused, read_to = [Piece(0, 0, start)] if start else [], set[int](), 0, start
    for at, place, size in edit.passages:
        cached = sorted(int(token) - at + place for token in tokens if at <= token < at + size)
        anew = {*cached[: -(-len(cached) // 10)]}
        if chosen is not None:
            anew = {*range(place, place + 64), *(one for one in chosen.tolist() if place <= one < place + size)}
        unread |= {*range(read_to, place), *anew}
        reused += len({*cached} - anew)
        stays, read_to = [one for one in range(place, place + size) if one not in anew], place + size
        runs = np.split(stays, np.flatnonzero(np.diff(stays) != 1) + 1) if stays else []
        pieces += [Piece(int(run[0]) - place + at, int(run[0]), len(run)) for run in runs]
    unread |= {*range(read_to, new.size)} if chosen is None else {*chosen[chosen >= read_to].tolist()}
    assert list(edit.pieces) == pieces
    assert [*edit.unread, *edit.later] == sorted(unread)
    assert edit.unread.dtype == edit.later.dtype == np.int32
    assert edit.reused == reused


class Looked(np.ndarray):
    """An array that counts the elements that are looked at."""

    count = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **options: Any) -> Any:
        arrays = [np.asarray(one) if isinstance(one, Looked) else one for one in given]
        Looked.count += max(map(np.size, arrays))
        made = getattr(ufunc, method)(*arrays, **options)
        return made.view(Looked) if isinstance(made, np.ndarray) else made


@pytest.mark.parametrize("chosen", [None, 4000])
def test_each_passage_is_looked_for_behind_the_one_before_it(
    chosen: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    M, places, held = 20_000, edits._last_places, HeldTokens.all(20_000)
    monkeypatch.setattr(edits, "_last_places", lambda *given: places(*given).view(Looked))
    monkeypatch.setattr(EditedPrefixes, "_is_change", lambda *_: False)
    held._index = tuple(one.view(Looked) for one in held._indexed())
    old = np.random.default_rng(0).integers(0, 1000, M).astype(np.int32)
    new = np.insert(old, np.arange(500, M - 500, 150), 1000).astype(np.int32)
    finder, Looked.count = EditedPrefixes(cast(Any, None), cast(Any, None)), 0
    wanted = None if chosen is None else np.arange(chosen, dtype=np.int32).view(Looked)
    found = finder._edit(new.view(Looked), old.view(Looked), held, wanted)
    assert len(found.passages) > 120
    assert Looked.count < 60 * M  # half of it for the hashes; a look at all the rest for each passage takes 660
