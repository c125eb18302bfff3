"""A cached prompt whose text was edited: kept keys stand where the new prompt has them, and the rest is read around."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill import SparseUnsupportedError
from mlx_specprefill.adapters.moved_keys import Piece, layer_rotations, move
from mlx_specprefill.cache.positioned import leaves, make_positioned_cache
from mlx_specprefill.specprefill.sparse_prefill import feed, recalling
from tests.properties.test_sparse_equals_masked import VERIFIED
from tests.support.oracle import build, on_the_cpu_unfused
from tests.support.precision import assert_close
from tests.support.refusals import MOVE_REFUSALS
from tests.support.steps import finish, prefill
from tests.support.tiny import random_prompt

A, OLD, NEW, KEPT, LAST = 20, 9, 14, 60, 7  # tokens: in front, replaced, new, behind the edit, at the end
SEAM = 10
MOVED = [name for name in VERIFIED if name not in MOVE_REFUSALS]


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    with on_the_cpu_unfused():
        yield


@pytest.mark.parametrize("name", MOVE_REFUSALS)
def test_what_can_not_be_moved_is_refused(name: str) -> None:
    with pytest.raises(SparseUnsupportedError, match=MOVE_REFUSALS[name]):
        layer_rotations(build(name))


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
    places = np.argsort(first.runs.expand(), kind="stable")
    assert first.runs.expand()[places].tolist() == list(range(len(after)))
    for ours, theirs in ((first.keys, dense.keys), (first.values, dense.values)):
        assert_close(ours[..., mx.array(places), :], theirs[..., : len(after), :], 1e-4)


@pytest.mark.parametrize("name", MOVED)
def test_with_the_same_text_in_front_the_answer_is_that_of_the_whole_prompt(name: str) -> None:
    text = [*random_prompt(A + OLD, 1), *random_prompt(KEPT, 2), *random_prompt(LAST, 3)]
    _, _, ours, dense = read_both(name, text, text, OLD, OLD)
    assert_close(ours, dense, 1e-4)


def read_both(
    name: str, before: list[int], after: list[int], old: int, new: int
) -> tuple[Any, Any, mx.array, mx.array]:
    """Return the caches and last logits of a prompt that goes on from the one before, and of one that is read whole."""
    model = build(name)
    rotations = layer_rotations(model)
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
