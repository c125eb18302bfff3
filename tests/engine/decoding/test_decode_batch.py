"""Rows that decode together: each gets what it gets alone, and what is left of it is exact."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specprefill.choosing.sampling import greedy
from mlx_specprefill.engine.decoding.decode_batch import DecodeBatch, DecodeRow, RowFailed
from mlx_specprefill.events import TokenEvent
from mlx_specprefill.request import SamplingParams
from tests.support.oracle import build, vocabulary
from tests.support.rows import (
    Row,
    alone,
    assert_same_contents,
    batch_row,
    contents,
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
    batch = DecodeBatch(model)
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


def test_a_row_does_not_keep_its_prompts_logits(llama: Any) -> None:
    """They are part of those of all rows of the prefill's last forward."""
    batch = DecodeBatch(llama)
    before = mx.get_active_memory()
    for uid, made in enumerate(make_rows(VOCAB, 8)):
        row = batch_row(llama, uid, made)
        forward = mx.zeros((1, 64, 1 << 14))  # of a larger vocabulary: 4 MiB
        mx.eval(forward)
        batch.add(replace(row, logits=forward[:, -1, :VOCAB]))
        del row, forward
    for _ in range(2):
        batch.step()
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


steps = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=14)


@pytest.mark.extended
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_5"])
@settings(max_examples=15)
@given(schedule=steps)
def test_any_schedule_gives_every_row_its_own_answer(family: str, schedule: list[tuple[int, int]]) -> None:
    """Each entry toggles one row (in or out) and then takes some steps; a row that returns starts over."""
    model, _, answers, ready = known(family)
    batch = DecodeBatch(model)
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
        for key in batch.uids:
            assert got[key] == answers[key][: len(got[key])]
    for uid in batch.uids:
        removed = batch.remove(uid)
        assert len(contents(removed.cache)) == len(contents(ready[uid][0]))
        assert removed.tokens == tuple(answers[uid][: len(removed.tokens)])
