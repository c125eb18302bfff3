"""C1-C5: the selection rule against brute force."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_specprefill import InvalidRequestError, SelectionConfig, keep_pct
from mlx_specprefill.selection.selector import (
    by_sentence,
    chunk_means,
    kept_spans,
    missing_of,
    next_ranked,
    select_chunks,
    select_tokens,
    selection_by,
    strongest,
)
from mlx_specprefill.selection.text import PromptText


def text_of(units):
    return PromptText(np.asarray(units, dtype=np.int32))


def brute_force(scores: list[float], forced: list[bool], keep: Fraction, size: int) -> list[int]:
    """The rule as the specification words it, one chunk at a time."""
    M, C = len(forced), len(scores)
    chunks = [range(c * size, min((c + 1) * size, M)) for c in range(C)]
    whole = {c for c in range(C) if all(forced[i] for i in chunks[c])}
    budget = math.ceil(C * keep)
    wanted = max(budget - len(whole), math.ceil(Fraction(budget, 2)))
    order = sorted((c for c in range(C) if c not in whole), key=lambda c: (-scores[c], c))
    kept = {i for c in order[:wanted] for i in chunks[c]} | {i for i in range(M) if forced[i]}
    return sorted(kept)


@st.composite
def cases(draw):
    size = draw(st.integers(1, 9))
    M = draw(st.integers(1, 120))
    C = -(-M // size)
    scores = draw(st.lists(st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0]), min_size=C, max_size=C))  # many ties
    forced = draw(st.lists(st.booleans(), min_size=M, max_size=M))
    if draw(st.booleans()):
        forced = [False] * (M - 1) + [True]
    keep = Fraction(draw(st.integers(0, 100)), 100)
    return scores, forced, keep, size


@given(cases())
def test_equals_brute_force_with_ties_and_a_ragged_last_chunk(case):
    scores, forced, keep, size = case
    selection = select_chunks(np.array(scores, np.float32), np.array(forced), keep, size)
    assert selection.kept.tolist() == brute_force(scores, forced, keep, size)
    assert selection.kept.dtype == np.int32


def test_the_ceiling_is_exact():
    """0.07 * 100 is 7.000000000000001 in binary floating point: a float ceiling would keep 8 chunks."""
    assert math.ceil(100 * 0.07) == 8
    forced = np.zeros(100, dtype=bool)
    for share in range(1, 101):
        kept = select_chunks(np.arange(100, dtype=np.float32), forced, keep_pct(share / 100), 1).kept
        assert kept.size == share


@pytest.mark.parametrize("bad", [0, -0.1, 1.01, "x", float("nan"), float("inf"), True, None, "1/0"])
def test_bad_shares_are_refused_by_name(bad):
    with pytest.raises(InvalidRequestError) as raised:
        keep_pct(bad)
    assert raised.value.field == "specprefill_keep_pct"


@given(st.integers(1, 200), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_chunk_means(M, size, seed):
    importance = np.random.default_rng(seed).random(M).astype(np.float32)
    expected = [importance[i : i + size].astype(np.float64).mean() for i in range(0, M, size)]
    np.testing.assert_allclose(chunk_means(importance, size), expected, rtol=1e-6)


@given(st.sets(st.integers(0, 60)))
def test_kept_spans_are_maximal_and_cover(indices):
    kept = np.array(sorted(indices), dtype=np.int32)
    spans = kept_spans(kept)
    assert [i for start, end in spans for i in range(start, end)] == kept.tolist()
    assert all(before[1] < after[0] for before, after in itertools.pairwise(spans))


def selected(scores, keep, forced=()):
    """Chunks of two tokens."""
    scores = np.array(scores, dtype=np.float32)
    mask = np.zeros(2 * scores.size, dtype=bool)
    mask[list(forced)] = True
    return select_chunks(scores, mask, keep, 2)


def tokens(count, *chunks):
    mask = np.zeros(count, dtype=bool)
    for chunk in chunks:
        mask[2 * chunk : 2 * chunk + 2] = True
    return mask


def missing(selection, held, stands_out=2.0):
    """Return the result of `missing_of` as plain values."""
    found = missing_of(selection, held, stands_out)
    assert found.dtype == np.int32
    return found.tolist()


def test_only_what_stands_out_is_missing():
    """Chunks that aren't chosen score 1. Chunk 1 stands out with 24; chunk 3 is chosen with 1.9 and does not."""
    scores = [1, 24, 1, 1.9, *[1] * 40, 12]
    selection = selected(scores, Fraction(3, 45))
    assert selection.chunk_chosen.nonzero()[0].tolist() == [1, 3, 44]
    assert missing(selection, tokens(90)) == [2, 3, 88, 89]
    assert missing(selection, tokens(90, 1)) == [88, 89]
    assert missing(selection, tokens(90, 1, 44)) == []
    half = tokens(90, 44)
    half[2] = True
    assert missing(selection, half) == [3]
    assert missing(selection, tokens(90), stands_out=13) == [2, 3]
    assert missing(selection, tokens(90), stands_out=math.inf) == []


def test_how_much_is_looked_at_elsewhere_does_not_matter():
    """Tokens that the session holds may draw a hundred times the attention, as an earlier question in the same words
    does.
    """
    scores = [1, 4, *[1] * 40, 400]
    assert missing(selected(scores, Fraction(2, 43)), tokens(86, 42)) == [2, 3]


def test_chosen_chunks_beside_one_that_stands_out_are_missed_with_it():
    """Where a line crosses borders: chunks 1, 3 and 4 go on from chunk 2, chunk 6 from nothing that stands out."""
    selection = selected([1, 1.5, 12, 1.5, 1.5, 1, 1.8, *[1] * 60], Fraction(5, 67))
    assert missing(selection, tokens(134)) == [*range(2, 10)]
    assert missing(selection, tokens(134, 3)) == [2, 3, 4, 5, 8, 9]


def test_what_goes_on_for_long_is_not_missed_with_what_stands_out():
    """32 tokens of chunks that were chosen on either side of chunk 40."""
    scores = np.ones(600, dtype=np.float32)
    scores[15:66], scores[40] = 1.5, 12
    assert missing(selected(scores, Fraction(51, 600)), tokens(1200)) == [*range(48, 114)]


@pytest.mark.parametrize("size", [1, 4, 8, 16, 32])
def test_the_size_of_chunks_does_not_decide_what_is_missing(size):
    importance = np.ones(960, dtype=np.float32)
    importance[320:352], importance[640:672] = 2.1, 1.9
    selection = select_tokens(
        importance, np.zeros(960, dtype=bool), text_of([0]), Fraction(1, 10), SelectionConfig(chunk_size=size)
    )
    found = missing(selection, np.zeros(960, dtype=bool))
    assert set(range(320, 352)) <= set(found)
    assert not set(found) & set(range(640, 672))


def test_where_everything_is_held_or_nothing_was_looked_at_nothing_is_missing():
    selection = selected([1, 11.9, 1, 2, 1], Fraction(2, 5))
    assert missing(selection, np.ones(10, dtype=bool)) == []
    assert missing(selected([0, 0, 0, 0, 0], Fraction(2, 5)), np.zeros(10, dtype=bool)) == []


def test_forced_tokens_are_neither_ordinary_nor_missing():
    """Chunk 0 is forced, seen by every turn, and draws most attention."""
    selection = selected([90, 1, 12, *[1] * 30], Fraction(2, 33), forced=(0, 1))
    assert missing(selection, tokens(66, 0)) == [4, 5]
    assert missing(selection, tokens(66, 0, 2)) == []


def test_what_lies_after_the_earlier_turn_does_not_count():
    selection = selected([14, *[1] * 20, 13], Fraction(2, 22))
    assert missing(selection, np.ones(30, dtype=bool)) == []
    assert missing(selection, np.zeros(30, dtype=bool)) == [0, 1]
    assert missing(selection, np.zeros(0, dtype=bool)) == []


def together_by_hand(importance, units, limit):
    """Unit by unit, as the rule is worded."""
    M = len(importance)
    weights = [0.0] * M
    whole = list(itertools.pairwise([*units, M]))
    cut = [(at, min(at + 32, end)) for start, end in whole if end - start > limit for at in range(start, end, 32)]
    for start, end in [unit for unit in whole if unit[1] - unit[0] <= limit] + cut:
        seen = max(sum(importance[at : min(at + 13, end)]) for at in range(start, end))
        weights[start:end] = [seen / 13] * (end - start)
    return weights


def chunk_scores(importance, units, rule):
    nothing = np.zeros(importance.size, dtype=bool)
    return select_tokens(importance, nothing, text_of(units), Fraction(1, 5), rule).chunk_scores


@given(st.integers(0, 10_000), st.integers(1, 90), st.integers(1, 20), st.integers(1, 40))
def test_lines_and_sentences_are_kept_together_as_by_hand(seed, M, size, limit):
    rng = np.random.default_rng(seed)
    importance = rng.random(M).astype(np.float32)
    units = np.unique(np.append(0, rng.integers(0, M, rng.integers(0, 12)))).astype(np.int32)
    rule = SelectionConfig(chunk_size=size, sentence_limit=limit)
    weights = together_by_hand(importance.tolist(), units.tolist(), limit)
    np.testing.assert_allclose(by_sentence(importance, units, rule), weights, rtol=1e-5)
    chunks = [slice(start, start + size) for start in range(0, M, size)]
    expected = [max(importance[chunk].mean(), *weights[chunk]) for chunk in chunks]
    np.testing.assert_allclose(chunk_scores(importance, units, rule), expected, rtol=1e-5)


def test_what_is_carried_over_the_end_of_a_line_is_not_asked_for():
    """The last four tokens were not looked at, only smoothed into: their line as a whole is ordinary."""
    importance = np.full(80, 1, dtype=np.float32)
    importance[24:40], importance[40:44] = 60, 20
    text, forced = text_of(range(0, 80, 20)), np.zeros(80, dtype=bool)
    selection = select_tokens(importance, forced, text, Fraction(3, 10), SelectionConfig(chunk_size=4))
    assert set(range(24, 44)) <= set(selection.kept.tolist())
    assert selection.token_scores[[24, 39, 40]].tolist() == pytest.approx([60, 60, (4 * 20 + 9) / 13])


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("shift", range(8))
def test_where_chunks_begin_does_not_decide_between_lines(size, shift):
    """A run of attention counts the same in one chunk or split over two."""
    importance, start = np.zeros(128, dtype=np.float32), 40 + shift
    importance[start : start + 13] = 1
    scores = chunk_scores(importance, [0, start], SelectionConfig(chunk_size=size))
    np.testing.assert_allclose(scores[start // size :], 1, rtol=1e-6)


def test_with_room_for_it_a_long_line_is_whole():
    importance = np.full(512, 0.01, dtype=np.float32)
    importance[64:72] = 1.0
    forced = np.zeros(512, dtype=bool)
    kept = select_tokens(
        importance, forced, text_of([0, 64, 160]), Fraction(6, 32), SelectionConfig(chunk_size=16)
    ).kept
    assert kept.tolist() == [*range(64, 160)]


def test_the_papers_chunks_compete_by_their_means_alone():
    """Chunks of 32, whatever is said where; with the same tokens forced."""
    rng = np.random.default_rng(4)
    importance, forced = rng.random(300).astype(np.float32), np.arange(300) > 280
    rule = selection_by("paper", SelectionConfig(sentence_limit=50))
    selection = select_tokens(importance, forced, text_of(np.arange(0, 300, 24)), Fraction(1, 5), rule)
    means = [float(importance[start : start + 32].mean(dtype=np.float64)) for start in range(0, 300, 32)]
    assert selection.kept.tolist() == brute_force(means, forced.tolist(), Fraction(1, 5), 32)
    np.testing.assert_array_equal(selection.token_scores, importance)
    assert replace(SelectionConfig(sentence_limit=50), chunk_size=32, by_sentence=False) == rule


def test_bad_chunks_are_refused():
    with pytest.raises(ValueError, match="chunk_size"):
        SelectionConfig(chunk_size=0)


def test_a_heading_is_kept_with_the_best_line_below_it() -> None:
    """Two headings with ten lines of four tokens each; two lines of the first matter, and there is room for two."""
    importance = np.zeros(88, dtype=np.float32)
    importance[20:24], importance[36:40] = 0.5, 1.0
    units = np.arange(0, 88, 4, dtype=np.int32)
    headings = np.array([[0, 4, 44], [44, 48, 88]], dtype=np.int32)
    forced = np.zeros(88, dtype=np.bool_)
    config = SelectionConfig(chunk_size=4)
    kept = select_tokens(importance, forced, PromptText(units, headings), Fraction(1, 11), config).kept
    assert kept.tolist() == [0, 1, 2, 3, 36, 37, 38, 39]
    kept = select_tokens(importance, forced, PromptText(units), Fraction(1, 11), config).kept
    assert kept.tolist() == [20, 21, 22, 23, 36, 37, 38, 39]


def test_the_strongest_runs_are_recalled_first() -> None:
    asked = np.zeros(20, dtype=np.float32)
    asked[[3, 9, 15]] = 1.0, 3.0, 2.0
    tokens = np.array([2, 3, 8, 9, 10, 15], dtype=np.int32)
    for most, expected in ((0, []), (3, [8, 9, 10]), (4, [8, 9, 10, 15]), (5, [2, 8, 9, 10, 15]), (9, tokens.tolist())):
        assert strongest(tokens, asked, most).tolist() == expected
    assert strongest(tokens[:0], asked, 5).size == 0


@pytest.mark.parametrize(
    ("reading", "start", "expected"),
    [([0, 5], 0, [2, 3]), ([4, 5], 4, []), ([2, 4, 5], 1, [1, 3]), ([5], 3, [3])],
)
def test_as_many_rank_next_as_are_read_there(reading: list[int], start: int, expected: list[int]) -> None:
    importance = np.array([9, 1, 5, 4, 0, 3], dtype=np.float32)
    assert np.flatnonzero(next_ranked(importance, np.array(reading, dtype=np.int32), start)).tolist() == expected
