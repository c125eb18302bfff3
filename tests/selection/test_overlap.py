"""Importance from the tokens of one tokenizer to those of another, against the definition in a loop over characters."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlx_specprefill.adapters.tokens.text_mapping import DraftText


def text_of(target, draft):
    return DraftText(np.zeros(len(draft), dtype=np.int32), target, draft)


def characters(spans):
    return [set(range(start, end)) for start, end in spans.tolist()]


def meeting(spans, others):
    """The others with which each token shares a character."""
    return [[at for at, other in enumerate(characters(others)) if own & other] for own in characters(spans)]


@st.composite
def overlaps(draw):
    total = draw(st.integers(1, 40))

    def side():
        count = draw(st.integers(0, 30))
        edges = st.lists(st.integers(0, total), min_size=count, max_size=count).map(sorted)
        ends = [*draw(edges), total]
        starts = np.minimum([0, *draw(edges)], [0, *ends[:-1]])  # every character has a token
        return np.stack([starts, ends], axis=1)

    return text_of(side(), side())


@given(overlaps(), st.randoms(use_true_random=False))
def test_importance_is_the_maximum_over_shared_characters(overlap, rng):
    found = np.array([rng.random() for _ in overlap.draft_spans], dtype=np.float32)
    expected = [max(found[tokens], default=0) for tokens in meeting(overlap.target_spans, overlap.draft_spans)]
    assert overlap.importance(found).tolist() == expected


@given(overlaps(), st.randoms(use_true_random=False))
def test_a_mask_holds_where_all_of_a_tokens_text_is_masked(overlap, rng):
    chosen = np.array([rng.random() < 0.6 for _ in overlap.target_spans])
    expected = [bool(chosen[tokens].all()) for tokens in meeting(overlap.draft_spans, overlap.target_spans)]
    assert overlap.mask(chosen).tolist() == expected


@given(overlaps(), st.data())
def test_a_span_is_what_its_characters_lie_in(overlap, data):
    start = data.draw(st.integers(0, len(overlap.target_spans) - 1))
    end = data.draw(st.integers(start + 1, len(overlap.target_spans)))
    first, stop = overlap.span(start, end)
    assert 0 <= first < stop <= len(overlap.draft_spans)
    if inside := set[int]().union(*meeting(overlap.target_spans, overlap.draft_spans)[start:end]):
        assert first <= min(inside)
        assert stop == max(inside) + 1


def test_a_long_prompt_takes_no_time():
    """65 536 target tokens over 200 000 draft tokens; a quadratic search would take minutes."""
    rng = np.random.default_rng(0)
    draft, target = (np.sort(rng.integers(0, 300_000, count)) for count in (200_001, 65_537))
    overlap = text_of(*(np.stack([edges[:-1], edges[1:]], axis=1) for edges in (target, draft)))
    began = time.perf_counter()
    assert overlap.importance(rng.random(200_000, dtype=np.float32)).shape == (65_536,)
    assert overlap.mask(rng.random(65_536) < 0.5).shape == (200_000,)
    assert time.perf_counter() - began < 5
