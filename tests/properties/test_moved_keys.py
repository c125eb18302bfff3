"""A cached prompt whose text was edited: kept keys stand where the new prompt has them, and the rest is read around."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill import SparseUnsupportedError
from mlx_specprefill.adapters.moved_keys import Piece, append, cut, movable_layers, move
from mlx_specprefill.cache.feeding import feed
from mlx_specprefill.cache.positioned import leaves, make_positioned_cache, recalling
from mlx_specprefill.selection.selector import kept_spans
from tests.properties.test_sparse_equals_masked import VERIFIED
from tests.support.oracle import build
from tests.support.precision import assert_close
from tests.support.refusals import MOVE_REFUSALS
from tests.support.steps import finish, prefill
from tests.support.tiny import random_prompt

A, OLD, NEW, KEPT, LAST = 20, 9, 14, 60, 7  # tokens: in front, replaced, new, behind the edit, at the end
SEAM = 10
RECALLED = np.array([11, 12, 47], dtype=np.int32)  # of the text that was read in part, behind the rest
HELD = np.setdiff1d(np.arange(A + OLD + KEPT), [*range(5, 14), *range(40, 52), A + OLD + KEPT - 1]).astype(np.int32)
MOVED = [name for name in VERIFIED if name not in MOVE_REFUSALS]


pytestmark = pytest.mark.usefixtures("on_the_cpu")


@pytest.mark.parametrize("name", MOVE_REFUSALS)
def test_what_can_not_be_moved_is_refused(name: str) -> None:
    with pytest.raises(SparseUnsupportedError, match=MOVE_REFUSALS[name]):
        movable_layers(build(name))


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize(("old", "new"), [(OLD, NEW), (NEW, OLD), (0, NEW), (OLD, 0)])
def test_kept_keys_stand_at_their_new_places_and_what_is_read_beside_them(name: str, old: int, new: int) -> None:
    """In the first layer keys depend on the token and its place alone: all equal those of the whole new prompt."""
    behind = random_prompt(KEPT, 2)
    before, after = (
        [*random_prompt(A, 1), *random_prompt(size, 4 + size), *behind, *random_prompt(LAST, 3)] for size in (old, new)
    )
    cache, whole, _, _ = read_both(name, before, after, old, new)
    first, dense = next(iter(leaves(cache))), next(iter(leaves(whole)))
    places = np.argsort(first.held.positions, kind="stable")
    assert first.held.positions[places].tolist() == list(range(len(after)))
    for ours, theirs in ((first.keys, dense.keys), (first.values, dense.values)):
        assert_close(ours[..., mx.array(places), :], theirs[..., : len(after), :], 1e-4)


@pytest.mark.parametrize("name", MOVED)
def test_with_the_same_text_in_front_the_answer_is_that_of_the_whole_prompt(name: str) -> None:
    text = [*random_prompt(A + OLD, 1), *random_prompt(KEPT, 2), *random_prompt(LAST, 3)]
    _, _, ours, dense = read_both(name, text, text, OLD, OLD)
    assert_close(ours, dense, 1e-4)


@pytest.mark.parametrize("name", MOVED)
def test_read_anew_between_kept_tokens_each_sees_what_is_in_front_of_it(name: str) -> None:
    """All of the text was the same, so the answer is that of the whole prompt, and so is every key."""
    model, text = build(name), random_prompt(A + KEPT + LAST, 1)
    cache, whole, prompt = make_positioned_cache(model), make_prompt_cache(model), np.array(text, dtype=np.int32)
    finish(prefill(model, cache, prompt[:-LAST], None, 32))
    anew = np.array([*range(A, A + 5), *range(A + 9, A + 30, 2), A + KEPT - 3], dtype=np.int32)
    stays = kept_spans(np.setdiff1d(np.arange(A + KEPT, dtype=np.int32), anew))
    move(cache, movable_layers(model), [Piece(start, start, end - start) for start, end in stays])
    with recalling(cache):
        list(feed(model, cache, prompt[anew], anew, [4, 11, anew.size]))
    last = np.arange(A + KEPT, prompt.size, dtype=np.int32)
    ours = answered(model, cache, prompt[last], last)
    assert_close(ours, model(mx.array(prompt)[None], cache=whole)[0, -1:], 1e-4)
    for mine, its in zip(leaves(cache), leaves(whole), strict=True):
        places = mx.array(np.argsort(mine.held.positions, kind="stable"))
        for array, other in ((mine.keys, its.keys), (mine.values, its.values)):
            assert_close(array[..., places, :], other[..., : prompt.size, :], 1e-3)


@pytest.mark.parametrize("name", MOVED)
def test_a_text_that_was_read_in_part_is_moved_like_one_that_was_read_at_the_new_places(name: str) -> None:
    """All of it stands further behind, so the keys of all layers are those of the same tokens read there."""
    model, text = build(name), random_prompt(A + OLD + KEPT, 1)
    moved, there = (make_positioned_cache(model) for _ in range(2))
    read_in_part(model, moved, text, 0)
    move(moved, movable_layers(model), [Piece(0, NEW, len(text))])
    read_in_part(model, there, text, NEW)
    for ours, theirs in zip(leaves(moved), leaves(there), strict=True):
        size = HELD.size + RECALLED.size
        assert (ours.next, ours.slots) == (len(text) + NEW, size)
        order, other = (mx.array(np.argsort(part.held.positions, kind="stable")) for part in (ours, theirs))
        for mine, its in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert_close(mine[..., order, :], its[..., other, :], 1e-3)
    last = np.array(random_prompt(LAST, 3), dtype=np.int32)
    places = np.arange(LAST, dtype=np.int32) + len(text) + NEW
    assert_close(answered(model, moved, last, places), answered(model, there, last, places), 1e-3)


@pytest.mark.parametrize("name", MOVED)
def test_of_a_text_that_was_read_in_part_pieces_are_kept_by_place(name: str) -> None:
    """Not moved, it answers as if the tokens between the pieces had been masked out."""
    model, text = build(name), random_prompt(A + OLD + KEPT, 1)
    moved, fed = (make_positioned_cache(model) for _ in range(2))
    read_in_part(model, moved, text, 0)
    move(moved, movable_layers(model), [Piece(0, 0, 45), Piece(45, 45, len(text) - 45)])
    read_in_part(model, fed, text, 0)
    last = np.array(random_prompt(LAST, 3), dtype=np.int32)
    places = np.arange(LAST, dtype=np.int32) + len(text)
    assert_close(answered(model, moved, last, places), answered(model, fed, last, places), 1e-4)
    move(fed, movable_layers(model), [Piece(0, 0, 12), Piece(45, 60, 30), Piece(83, 100, 6)])
    held = np.union1d(HELD, RECALLED)
    kept = [*held[held < 12], *(held[(held >= 45) & (held < 75)] + 15), *(held[(held >= 83) & (held < 89)] + 17)]
    assert next(iter(leaves(fed))).held.positions.tolist() == kept


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("new", [0, NEW])
def test_a_dense_cache_takes_up_what_is_inserted_in_order(name: str, new: int) -> None:
    """The first layer is that of the whole new prompt. With nothing inserted, so is the answer."""
    model, front, behind = build(name), random_prompt(A, 1), random_prompt(KEPT, 2)
    after = (*front, *random_prompt(new, 4), *behind, *random_prompt(LAST, 3))
    cache, dense = make_prompt_cache(model), make_prompt_cache(model)
    model(mx.array((*front, *behind))[None], cache=cache)
    whole = cut(cache, A)
    prompt = np.array(after, dtype=np.int32)
    if new:
        list(feed(model, cache, prompt[A : A + new], None, [new]))
    append(cache, whole, movable_layers(model), Piece(A, A + new, KEPT))
    *_, (_, ours) = feed(model, cache, prompt[-LAST:], None, [LAST], logits=True)
    theirs = model(mx.array(after)[None], cache=dense)[0, -1:]
    first, other = next(iter(leaves(cache))), next(iter(leaves(dense)))
    assert first.offset == len(after)
    for mine, its in ((first.keys, other.keys), (first.values, other.values)):
        assert_close(mine[..., : len(after), :], its[..., : len(after), :], 1e-4)
    if not new:
        assert ours is not None
        assert_close(ours, theirs, 1e-4)


def read_in_part(model: Any, cache: list[Any], text: tuple[int, ...], place: int) -> None:
    """Feed the tokens that are held, `place` positions behind their own, then the recalled ones."""
    ids = np.array(text, dtype=np.int32)
    list(feed(model, cache, ids[HELD], HELD + np.int32(place), [30, HELD.size]))
    with recalling(cache):
        list(feed(model, cache, ids[RECALLED], RECALLED + np.int32(place), [RECALLED.size]))


def answered(model: Any, cache: list[Any], tokens: Any, places: Any) -> mx.array:
    *_, (_, logits) = feed(model, cache, tokens, places, [tokens.size], logits=True)
    assert logits is not None
    return logits


def read_both(
    name: str, before: list[int], after: list[int], old: int, new: int
) -> tuple[Any, Any, mx.array, mx.array]:
    """Return the caches and last logits of a prompt that goes on from the one before, and of one that is read whole."""
    model = build(name)
    rotations = movable_layers(model)
    cache, whole, prompt = make_positioned_cache(model), make_prompt_cache(model), np.array(after, dtype=np.int32)
    finish(prefill(model, cache, np.array(before[:-LAST], dtype=np.int32), None, 32))
    move(cache, rotations, [Piece(0, 0, A), Piece(A + old + SEAM, A + new + SEAM, KEPT - SEAM)])
    missing = np.arange(A, A + new + SEAM, dtype=np.int32)
    with recalling(cache):
        list(feed(model, cache, prompt[missing], missing, [missing.size]))
    last = np.arange(A + new + KEPT, prompt.size, dtype=np.int32)
    *_, (_, ours) = feed(model, cache, prompt[last], last, [LAST], logits=True)
    dense = model(mx.array(prompt)[None], cache=whole)[0, -1:]
    assert ours is not None
    return cache, whole, ours, dense
