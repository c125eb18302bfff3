"""Groups of rows that share a forward, on plain integers."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from mlx_specprefill.engine.grouping import Groups, group_rows, padding, regroup

rows = st.lists(st.integers(0, 10_000), min_size=1, max_size=12)


def padded(sizes: list[int], groups: Groups) -> int:
    """Bytes of all groups, each row as long as the longest of its group."""
    return sum(len(group) * max(sizes[row] for row in group) for group in groups)


def cost(sizes: list[int], groups: Groups, read: int) -> int:
    """Bytes that a step reads."""
    return read * len(groups) + padded(sizes, groups)


def partition(draw_groups: list[int]) -> list[list[int]]:
    """Rows by the label of each."""
    return [[row for row, label in enumerate(draw_groups) if label == wanted] for wanted in sorted(set(draw_groups))]


@given(rows, st.integers(0, 100_000), st.sampled_from([0.0, 0.5, math.inf]))
def test_every_row_has_one_place_and_the_padding_is_bounded(sizes: list[int], read: int, share: float) -> None:
    most = share * max(1, sum(sizes))
    groups = group_rows(sizes, read, most)
    assert sorted(row for group in groups for row in group) == list(range(len(sizes)))
    assert padding(sizes, groups) == padded(sizes, groups) - sum(sizes) <= most
    assert cost(sizes, groups, read) <= cost(sizes, [[row] for row in range(len(sizes))], read)


@given(rows, st.integers(1, 100_000))
def test_no_two_groups_that_are_left_should_be_one(sizes: list[int], read: int) -> None:
    """Neighbours by length are all that could be."""
    groups = group_rows(sizes, read, math.inf)
    for index in range(len(groups) - 1):
        merged = [*groups[:index], groups[index] + groups[index + 1], *groups[index + 2 :]]
        assert cost(sizes, merged, read) >= cost(sizes, groups, read)


@given(rows, st.integers(0, 100_000), st.floats(0, 2))
def test_rows_of_one_length_always_share_a_forward(sizes: list[int], read: int, share: float) -> None:
    groups = group_rows(sizes, read, share * sum(sizes))
    for first in groups:
        for second in groups:
            if first is not second:
                assert not {sizes[row] for row in first} & {sizes[row] for row in second}


def test_a_long_row_is_kept_from_short_ones_and_short_ones_share_a_forward() -> None:
    sizes = [6000, *[20] * 15]
    assert group_rows(sizes, 5000, math.inf) == [list(range(1, 16)), [0]]
    assert len(group_rows(sizes, 100_000, math.inf)) == 1  # the weights are more than the padding
    assert len(group_rows(sizes, 100_000, 0.5 * sum(sizes))) == 2
    assert len(group_rows([20, 200, 90], 5000, math.inf)) == 1


@given(rows, st.data(), st.integers(0, 100_000), st.sampled_from([0.0, 0.5, math.inf]))
def test_groups_change_only_if_they_have_to_or_it_pays(
    sizes: list[int], data: st.DataObject, read: int, share: float
) -> None:
    labels = data.draw(st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes)))
    now, most = partition(labels), share * max(1, sum(sizes))
    after = regroup(sizes, now, read, most)
    assert padding(sizes, after) <= most
    if after == now:
        return
    assert after == group_rows(sizes, read, most)
    assert padding(sizes, now) > most or cost(sizes, after, read) < cost(sizes, now, read)
    assert regroup(sizes, after, read, most) == after
