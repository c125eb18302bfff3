"""Importance from the tokens of one tokenizer to those of another, against the definition in a loop over bytes."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_specprefill.specprefill.mapped import Overlap


def ends(*lengths):
    return np.cumsum(np.array(lengths, dtype=np.int64))


def owners(token_ends):
    """The token of every byte."""
    return np.repeat(np.arange(len(token_ends)), np.diff(token_ends, prepend=0))


def by_definition(overlap, found):
    """The maximum over bytes; tokens without text afterwards."""
    ours, theirs = owners(overlap.target), owners(overlap.draft)
    known = {int(token): max(found[theirs[ours == token]]) for token in np.unique(ours)}
    out = []
    for token in range(len(overlap.target)):
        before = [known[t] for t in range(token, -1, -1) if t in known][:1]
        after = [known[t] for t in range(token, len(overlap.target)) if t in known][:1]
        out.append(max(before + after))
    return np.array(out, dtype=np.float32)


@st.composite
def overlaps(draw):
    total = draw(st.integers(1, 40))

    def side():
        cuts = draw(st.lists(st.integers(0, total), max_size=30))
        return np.array([*sorted(cuts), total] + [total] * draw(st.integers(0, 2)), dtype=np.int64)

    return Overlap(side(), side())


@given(overlaps(), st.randoms(use_true_random=False))
def test_importance_is_the_maximum_over_shared_bytes(overlap, rng):
    found = np.array([rng.random() for _ in overlap.draft], dtype=np.float32)
    assert overlap.importance(found).tolist() == by_definition(overlap, found).tolist()


@given(overlaps(), st.randoms(use_true_random=False))
def test_a_mask_holds_where_all_of_a_tokens_text_is_masked(overlap, rng):
    chosen = np.array([rng.random() < 0.6 for _ in overlap.target])
    ours, theirs = owners(overlap.target), owners(overlap.draft)
    expected = [bool(chosen[ours[theirs == token]].all()) for token in range(len(overlap.draft))]
    assert overlap.mask(chosen).tolist() == expected


@given(overlaps(), st.data())
def test_a_span_is_what_its_bytes_lie_in(overlap, data):
    start = data.draw(st.integers(0, len(overlap.target) - 1))
    end = data.draw(st.integers(start + 1, len(overlap.target)))
    first, stop = overlap.span(start, end)
    ours, theirs = owners(overlap.target), owners(overlap.draft)
    inside = theirs[(ours >= start) & (ours < end)]
    assert 0 <= first < stop <= len(overlap.draft)
    if inside.size:
        assert (first, stop) == (inside.min(), inside.max() + 1)


@pytest.mark.parametrize(
    ("target", "draft", "found", "expected"),
    [
        (ends(3, 3), ends(3, 3), [1, 2], [1, 2]),
        (ends(6), ends(1, 2, 3), [1, 5, 2], [5]),
        (ends(1, 2, 3), ends(6), [4], [4, 4, 4]),
        (ends(2, 2, 2), ends(3, 3), [1, 7], [1, 7, 7]),  # the middle one overlaps both
        (ends(0, 3, 0, 3, 0), ends(3, 3), [1, 7], [1, 1, 7, 7, 7]),  # no text: the neighbours'
        (ends(3), ends(0, 1, 0, 2, 0), [9, 1, 9, 2, 9], [2]),  # the draft's tokens without text count nowhere
    ],
)
def test_by_hand(target, draft, found, expected):
    overlap = Overlap(target, draft)
    assert overlap.importance(np.array(found, dtype=np.float32)).tolist() == expected


@pytest.mark.parametrize(
    ("target", "draft"), [(ends(3), ends(4)), (ends(0), ends(0)), (ends(3, -1), ends(2)), (ends(), ends(1))]
)
def test_what_is_not_one_text_is_refused(target, draft):
    with pytest.raises(ValueError, match=r"ends of tokens|bytes"):
        Overlap(target, draft)


def test_a_long_prompt_takes_no_time():
    """65 536 target tokens over 200 000 draft tokens; a quadratic search would take minutes."""
    rng = np.random.default_rng(0)
    draft = np.cumsum(rng.integers(0, 4, 200_000))
    target = np.sort(rng.integers(0, draft[-1] + 1, 65_536))
    target[-1] = draft[-1]
    overlap, found = Overlap(target, draft), rng.random(draft.size, dtype=np.float32)
    chosen = rng.random(target.size) < 0.5
    began = time.perf_counter()
    assert overlap.importance(found).shape == target.shape
    assert overlap.mask(chosen).shape == draft.shape
    assert time.perf_counter() - began < 5
