"""Rows that decode together: each gets what it gets alone, and what is left of it is exact."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specprefill.cache import batched
from mlx_specprefill.cache.positioned import leaves
from mlx_specprefill.engine import decode_batch
from mlx_specprefill.engine.decode_batch import DecodeBatch, DecodeRow, RowFailed
from mlx_specprefill.events import TokenEvent
from mlx_specprefill.request import SamplingParams
from mlx_specprefill.sampling import greedy
from tests.support.oracle import build, vocabulary
from tests.support.rows import (
    Row,
    alone,
    assert_same_contents,
    batch_row,
    contents,
    crowd,
    logprob_error,
    make_rows,
    prefilled,
    together,
    tokens,
)
from tests.support.tiny import FAMILIES, VOCAB, tiny_model

CLOSE = 1e-4


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama")


class Counting:
    """A model that counts its forwards and their rows."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.rows: list[int] = []

    def __call__(self, inputs: mx.array, **kwargs: Any) -> mx.array:
        self.rows.append(inputs.shape[0])
        output: mx.array = self.model(inputs, **kwargs)
        return output


def counted(model: Any) -> tuple[DecodeBatch, list[int]]:
    batch = crowd(model)
    batch._model = counting = Counting(model)
    return batch, counting.rows


# --- joining and leaving ---------------------------------------------------------------------------------------------


def test_all_rows_share_one_forward(llama: Any) -> None:
    batch, forwards = counted(llama)
    for uid, row in enumerate(make_rows(VOCAB, 4)):
        batch.add(batch_row(llama, uid, row))
    for _ in range(3):
        assert sorted(uid for uid, _ in batch.step()) == [0, 1, 2, 3]
    batch.remove(2)
    batch.step()
    assert forwards == [4, 4, 4, 3]


def test_a_row_keeps_neither_the_cache_it_brought_nor_its_prompts_logits(llama: Any) -> None:
    """The cache is copied into the batch's; the logits are part of those of all rows of the prefill's last forward."""
    batch, left = DecodeBatch(llama), []
    before = mx.get_active_memory()
    for uid, made in enumerate(make_rows(VOCAB, 8)):
        row = batch_row(llama, uid, made)
        forward = mx.zeros((1, 64, 1 << 14))  # of a larger vocabulary: 4 MiB
        mx.eval(forward)
        batch.add(replace(row, logits=forward[:, -1, :VOCAB]))
        left += [weakref.ref(part) for part in leaves(row.cache)]
        del row, forward
    for _ in range(2):
        batch.step()
    assert not any(part() is not None for part in left)
    assert mx.get_active_memory() - before < 4 << 20


def test_a_first_token_asked_for_ahead_is_not_returned_again(llama: Any) -> None:
    """Beside a row that is decoding already, and with nothing else changed."""
    rows = make_rows(VOCAB, 2)
    expected = [tokens(alone(llama, row, 5)[0]) for row in rows]
    batch, forwards = counted(llama)
    batch.add(batch_row(llama, 0, rows[0]))
    got: list[list[TokenEvent]] = [[event for _, event in batch.step()], []]
    before = list(forwards)
    batch.add(batch_row(llama, 1, rows[1]))
    got[1].append(batch.first_token())
    assert forwards == before
    while min(map(len, got)) < 4:
        for uid, event in batch.step():
            got[uid].append(event)
    assert [len(events) for events in got] == [5, 4]
    for events, answer in zip(got, expected, strict=True):
        assert tokens(events) == answer[: len(events)]


def test_a_row_that_leaves_after_a_first_token_ahead_holds_its_prompt(llama: Any) -> None:
    batch = DecodeBatch(llama)
    prompt = make_rows(VOCAB, 1)[0]
    batch.add(batch_row(llama, 0, prompt))
    batch.first_token()
    removed = batch.remove(0)
    assert removed.tokens == ()
    assert_same_contents(removed.cache, prefilled(llama, prompt)[0])


def test_a_lone_row_keeps_its_own_cache(llama: Any) -> None:
    """No masks, no copies: it costs what it costs without a batch."""
    batch = DecodeBatch(llama)
    row = batch_row(llama, 0, make_rows(VOCAB, 1)[0])
    batch.add(row)
    for _ in range(3):
        batch.step()
    removed = batch.remove(0)
    assert all(ours is theirs for ours, theirs in zip(removed.cache, row.cache, strict=True))


def test_a_newcomer_without_room_goes_on_alone_until_all_layers_have_some(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer a step: no step copies the caches of all layers, and no answer changes."""
    monkeypatch.setattr(decode_batch, "COPYING_S", 0.0)
    rows = make_rows(VOCAB, 4, seed=5)
    batch, forwards = counted(llama)
    got: dict[int, list[int]] = {}
    for uid, row in enumerate(rows):
        batch.add(batch_row(llama, uid, row))
        got[uid] = []
        for _ in range(6):
            for key, event in batch.step():
                got[key].append(event.token)
    layers = len(batch.caches[0])
    joined = forwards.index(3)
    assert forwards[joined - 2 * (layers - 1) : joined + 1] == [*[2, 1] * (layers - 1), 3]
    assert [got[uid] for uid in got] == [tokens(alone(llama, row, len(got[uid]))[0]) for uid, row in enumerate(rows)]


# --- rows of other lengths -------------------------------------------------------------------------------------------


def rows_of(*lengths: int) -> list[Row]:
    rng = np.random.default_rng(1)
    return [Row(tuple(rng.integers(2, VOCAB, length).tolist())) for length in lengths]


def by_length(model: Any, *lengths: int, **changes: Any) -> tuple[DecodeBatch, list[int]]:
    batch = DecodeBatch(model, **changes)
    batch._model = counting = Counting(model)
    for uid, row in enumerate(rows_of(*lengths)):
        batch.add(batch_row(model, uid, row))
    return batch, counting.rows


def test_a_long_row_makes_no_short_one_as_long_as_itself(llama: Any) -> None:
    batch, forwards = by_length(llama, 20, 700, 21, 20, 22)
    batch.step()
    assert sorted(forwards) == [1, 4]
    assert padded(batch) < 1.02 * (700 + 83 + 5)


def test_without_room_only_rows_of_one_length_share_a_forward(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_batch, "COPYING_S", math.inf)
    room = [1 << 30]
    batch, forwards = by_length(llama, 30, 28, 30, 29, room=lambda own: room[0])
    batch.step()
    assert (forwards, batch.padding > 0) == ([4], True)
    room[0] = 0
    batch.plan_anew()
    batch.step()
    assert sorted(forwards[1:]) == [1, 1, 2]
    assert batch.padding == 0


# --- what is left of a row -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3_text", "lfm2"])
def test_the_cache_that_comes_out_holds_the_prompt_and_every_token(family: str) -> None:
    """For recurrent layers too, which could not forget a token that was fed ahead."""
    model = tiny_model(family) if family in FAMILIES else build(family)
    rows = make_rows(vocabulary(model), 4)
    counts = [40, 9, 1, 23]
    events, removed = together(model, rows, [0, 2, 2, 5], counts)
    for uid, row in enumerate(rows):
        expected, cache = alone(model, row, counts[uid] + 1)
        assert removed[uid].tokens == tuple(tokens(events[uid])) == tuple(tokens(expected[:-1]))
        assert_same_contents(removed[uid].cache, cache)


# --- samplers, penalties, log-probabilities ---------------------------------------------------------------------------

SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=1.3, seed=2, top_p=0.9, top_k=20, min_p=0.01),
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(temperature=0.8, seed=1, repetition_penalty=1.4, logit_bias={5: 3.0}),
    SamplingParams(frequency_penalty=2.0),
)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_5"])
@pytest.mark.extended
def test_every_row_has_its_own_sampler(family: str) -> None:
    """A seed means the same text in a batch, whoever else is in it; reported log-probabilities are the model's."""
    model = tiny_model(family)
    rows = make_rows(VOCAB, 6, seed=3)
    rows = [replace(row, sampling=sampling) for row, sampling in zip(rows, SAMPLINGS, strict=True)]
    rows[1] = replace(rows[1], logprobs=None)
    rows[2] = replace(rows[2], logprobs=0)
    events, _ = together(model, rows, [0, 0, 3, 4, 9, 9], [24] * 6)
    for uid, row in enumerate(rows):
        expected, _ = alone(model, row, 24)
        assert tokens(events[uid]) == tokens(expected)
        if row.logprobs is not None:
            assert logprob_error(events[uid], expected) < CLOSE
        assert all((event.logprob is None) == (row.logprobs is None) for event in events[uid])
        assert all(len(event.top_logprobs) == (row.logprobs or 0) for event in events[uid])


def test_a_processor_that_raises_ends_its_own_row_only(llama: Any) -> None:
    def fail(history: mx.array, logits: mx.array) -> mx.array:
        if history.size == 3:
            raise ArithmeticError("no way on")
        return logits

    rows = make_rows(VOCAB, 3)
    expected = [tokens(alone(llama, row, 12)[0]) for row in rows]
    batch = DecodeBatch(llama)
    for uid, row in enumerate(rows):
        spec = batch_row(llama, uid, row)
        batch.add(replace(spec, processors=[fail]) if uid == 1 else spec)
    got: dict[int, list[int]] = {0: [], 1: [], 2: []}
    failures = []
    while len(got[0]) < 12:
        try:
            events = batch.step()
        except RowFailed as failed:
            failures.append((failed.uid, repr(failed.__cause__), batch.remove(failed.uid).tokens))
            continue
        for uid, event in events:
            got[uid].append(event.token)
    assert failures == [(1, "ArithmeticError('no way on')", tuple(expected[1][:3]))]
    assert got == {0: expected[0], 1: expected[1][:3], 2: expected[2]}


def test_a_processor_that_raises_at_once_keeps_its_row_out(llama: Any) -> None:
    def fail(history: mx.array, logits: mx.array) -> mx.array:
        raise ArithmeticError("no way on")

    batch = DecodeBatch(llama)
    with pytest.raises(ArithmeticError):
        batch.add(replace(batch_row(llama, 0, make_rows(VOCAB, 1)[0]), processors=[fail]))
    assert len(batch) == 0


# --- rows of other kinds ---------------------------------------------------------------------------------


@pytest.mark.extended
def test_architectures_that_mix_rows_up_decode_one_by_one() -> None:
    model = build("phi3small")
    batch, forwards = counted(model)
    for uid, row in enumerate(make_rows(vocabulary(model), 3, sparse=False)):
        batch.add(batch_row(model, uid, row))
    batch.step()
    assert forwards == [1, 1, 1]


# --- any schedule ----------------------------------------------------------------------------------------------------


@cache
def known(family: str) -> tuple[Any, list[Row], list[list[int]], list[tuple[list[Any], mx.array]]]:
    """A model, rows, their answers alone, and their prefilled caches."""
    model = tiny_model(family)
    rows = make_rows(VOCAB, 6, seed=11)
    return model, rows, [tokens(alone(model, row, 60)[0]) for row in rows], [prefilled(model, row) for row in rows]


def cramped(model: Any) -> DecodeBatch:
    """A batch with room that comes and goes."""
    room = cycle([0, 3000, 20_000])
    return DecodeBatch(model, room=lambda own: next(room))


def padded(batch: DecodeBatch) -> int:
    """Return the tokens that a step reads in a layer, of all rows as long as their group's longest."""
    return sum(len(group.rows) * group.cache[0].size() for group in batch._groups)


def copying_is_over(batch: DecodeBatch) -> bool:
    return not any(group.strays for group in batch._groups)


steps = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=14)


@pytest.mark.extended
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_5"])
@settings(max_examples=15)
@given(
    schedule=steps,
    copying=st.sampled_from([0.0, math.inf]),
    idle=st.sampled_from([0, 1 << 30]),
    make=st.sampled_from([crowd, DecodeBatch, cramped]),
)
def test_any_schedule_gives_every_row_its_own_answer(
    family: str, schedule: list[tuple[int, int]], copying: float, idle: int, make: Callable[[Any], DecodeBatch]
) -> None:
    """Each entry toggles one row (in or out) and then takes some steps; a row that returns starts over.

    With one layer's cache copied per step, and all of them; in one forward, by length, and with hardly any room.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_batch, "COPYING_S", copying)
        patch.setattr(batched, "_IDLE_BYTES", idle)
        follow(family, schedule, make)


def follow(family: str, schedule: list[tuple[int, int]], make: Callable[[Any], DecodeBatch]) -> None:
    model, _, answers, ready = known(family)
    batch = make(model)
    got: dict[int, list[int]] = {}
    for uid, count in schedule:
        if uid in batch.uids:
            assert batch.remove(uid).tokens == tuple(got[uid])
        else:
            prompt_cache, logits = ready[uid]
            batch.add(DecodeRow(uid, copy.deepcopy(prompt_cache), logits, greedy))
            got[uid] = []
        for _ in range(min(count, 60 - max(map(len, got.values())))):
            for key, event in batch.step():
                got[key].append(event.token)
            if make is DecodeBatch and family == "llama" and copying_is_over(batch):
                slots = {key: ready[key][0][0].slots + len(got[key]) for key in batch.uids}
                assert padded(batch) <= 1.5 * sum(slots.values())
        for key in batch.uids:
            assert got[key] == answers[key][: len(got[key])]
    for uid in batch.uids:
        removed = batch.remove(uid)
        assert len(contents(removed.cache)) == len(contents(ready[uid][0]))
        assert removed.tokens == tuple(answers[uid][: len(removed.tokens)])
