"""Sparse prefixes: what was fed in several turns comes back as it was, to those alone that chose by the same rule."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specprefill import CacheLabel
from mlx_specprefill.cache.held import HeldTokens
from mlx_specprefill.cache.positioned import Positioned, leaves, make_positioned_cache, place
from mlx_specprefill.cache.prefix.disk import DiskTier
from mlx_specprefill.cache.prefix.selection_key import SelectionKey
from mlx_specprefill.cache.prefix.tree import PrefixCache
from tests.cache.prefix.stores import BLOCK, decode, feed, held_bytes, same
from tests.cache.prefix.test_tree import FAMILIES, STATEFUL, assert_close, dense, model_of, prefix_cache
from tests.support.rows import next_position
from tests.support.steps import recall
from tests.support.tiny import random_prompt

PROMPT = random_prompt(90)
A, B = (SelectionKey(share, "default", "user") for share in (Fraction(1, 5), Fraction(1, 3)))
# Prompt indices in the order of feeding: a dense beginning, one with gaps, a recall, what follows it, another recall.
TURNS: list[tuple[str, list[int]]] = [
    ("new", [*range(19), 23, 24, 30, 31, 32, 47]),
    ("recall", [20, 21, 27]),
    ("new", [*range(50, 59), 66, 67]),
    ("recall", [25, 40, 41, 60]),
    ("new", [*range(70, 90)]),
]
FED = np.array([index for _, part in TURNS for index in part], dtype=np.int32)


def played(family: str, turns: Sequence[tuple[str, list[int]]] = TURNS, prompt: Sequence[int] = PROMPT) -> list[Any]:
    """A cache that was fed in these turns."""
    model = model_of(family)
    cache = make_positioned_cache(model)
    for kind, part in turns:
        read(model, cache, kind, part, prompt)
    return cache


def read(model: Any, cache: list[Any], kind: str, part: list[int], prompt: Sequence[int]) -> None:
    indices = np.array(part, dtype=np.int32)
    if kind == "recall":
        recall(model, cache, prompt, indices, lambda: 2)
        return
    place(cache, indices)
    model(mx.array([prompt[i] for i in part])[None], cache=cache)
    mx.eval([layer.state for layer in cache])


def stored(family: str, **options: Any) -> PrefixCache:
    """A store that saw the cache behind each turn of new tokens."""
    prefixes, model = prefix_cache(family, **options), model_of(family)
    cache = make_positioned_cache(model)
    for kind, part in TURNS:
        read(model, cache, kind, part, PROMPT)
        if kind == "new":
            prefixes.store(PROMPT[: part[-1] + 1], cache, selection_key=A)
    return prefixes


def positions(cache: list[Any]) -> list[Any]:
    """Return every layer's positions. A ring may hold more than its window after a large chunk."""
    parts = [part for part in leaves(cache) if isinstance(part, Positioned)]
    most = [getattr(part, "max_size", FED.size) for part in parts]
    return [(part.held.positions[-n:].tolist(), part.next, part.slots) for part, n in zip(parts, most, strict=True)]


def test_what_was_fed_by_when_is_counted_one_by_one() -> None:
    fed = HeldTokens.of(FED)
    highest = np.maximum.accumulate(FED)
    for length in range(91):
        behind = [slot for slot in range(FED.size) if FED[slot] < length and FED[slot] == highest[slot]]
        assert fed.slots(length) == (behind[-1] + 1 if behind else 0)
    assert fed.dense == 19
    assert fed.within(8, 16) is None
    assert [int(i) for i in fed.within(16, 24)] == [16, 17, 18, 23]
    assert [int(i) for i in fed.within(48, 56)] == [20, 21, 27, *range(50, 56)]
    assert fed.within(33, 40).size == 0
    assert HeldTokens.of(np.arange(5, dtype=np.int32)).dense == 5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stored_turn_comes_back_as_it_was(family: str) -> None:
    prefixes = stored(family)
    for count in (1, 3, 5):
        length = TURNS[count - 1][1][-1] + 1
        hit = prefixes.lookup((*PROMPT[:length], 3), selection_key=A)
        assert hit.length == length
        assert hit.held.positions.tolist() == [i for _, part in TURNS[:count] for i in part]
        reference = played(family, TURNS[:count])
        assert_close(hit.cache, reference)
        assert positions(hit.cache) == positions(reference)
        ours, theirs = (decode(model_of(family), cache, mx.ones((1, 96)), 6) for cache in (hit.cache, reference))
        assert ours[0] == theirs[0]


@pytest.mark.parametrize("length", range(24, 91, 6))
def test_what_can_be_cut_is_served_at_any_length(length: int) -> None:
    """As if nothing had been fed behind it."""
    prefixes = stored("llama")
    hit = prefixes.lookup((*PROMPT[:length], 3, 4), selection_key=A)
    assert hit.length == length
    held = FED[: HeldTokens.of(FED).slots(length)]
    assert (hit.held.positions == held).all()
    assert next_position(hit.cache) == length
    whole = played("llama")
    for ours, theirs in zip(leaves(hit.cache), leaves(whole), strict=True):
        assert ours.slots == held.size
        assert np.array_equal(ours.keys[..., : held.size, :], theirs.keys[..., : held.size, :])
    feed(model_of("llama"), hit.cache, (3, 4))


@pytest.mark.parametrize("family", [family for family in FAMILIES if STATEFUL[family]])
def test_states_are_served_where_they_were_stored(family: str) -> None:
    hit = stored(family).lookup((*PROMPT[:80], 3), selection_key=A)
    assert hit.length == 68


@pytest.mark.parametrize("family", FAMILIES)
def test_what_lies_before_the_first_gap_is_dense(family: str) -> None:
    """A prompt that shares no more than that with a sparse one does not go on from it, but from dense blocks."""
    prefixes, tokens = stored(family), (*PROMPT[:18], 3, 4)
    found = prefixes.covers(tokens, selection_key=A)
    assert found == (0 if STATEFUL[family] else 16)  # whole blocks
    prefixes.store(PROMPT[:18], dense(family, PROMPT[:18])[0])
    hit = prefixes.lookup(tokens, selection_key=A)
    assert (hit.length, hit.held.dense) == (18, 18)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_those_find_it_that_choose_alike(family: str) -> None:
    """A dense request gets the beginning before the first gap at most, and that is exact."""
    prefixes = stored(family)
    assert prefixes.covers(PROMPT, selection_key=A) == 90
    for selection_key in (B, None):
        hit = prefixes.lookup(PROMPT, selection_key=selection_key)
        assert hit is None or (hit.length <= 19 and hit.held.dense == hit.length)
        assert prefixes.covers(PROMPT, selection_key=selection_key) == (0 if hit is None else hit.length)
        if hit is not None:
            assert_close(hit.cache, dense(family, PROMPT[: hit.length])[0])
    assert prefixes.lookup(PROMPT, label=CacheLabel("ann"), selection_key=A) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dense_prefix_as_long_is_preferred(family: str) -> None:
    prefixes = stored(family)
    prefixes.store(PROMPT[:68], dense(family, PROMPT[:68])[0])
    hit = prefixes.lookup((*PROMPT[:68], 3), selection_key=A)
    assert hit.held.dense == hit.length
    assert_close(hit.cache, dense(family, PROMPT[:68])[0])
    longer = prefixes.lookup(PROMPT, selection_key=A)
    assert longer.held.dense < longer.length


@pytest.mark.parametrize("family", FAMILIES)
def test_branches_share_what_they_have_in_common(family: str) -> None:
    """Two answers to one question, and the same question with another selection key."""
    prefixes = prefix_cache(family)
    cache = played(family, TURNS[:3])
    prefixes.store(PROMPT[:68], cache, selection_key=A)
    one = prefixes.nbytes
    for seed in (1, 2):
        hit = prefixes.lookup((*PROMPT[:68], 3), selection_key=A)
        more = random_prompt(5, seed)
        feed(model_of(family), hit.cache, more)
        prefixes.store((*PROMPT[:68], *more), hit.cache, selection_key=A)
    states = (
        0
        if not STATEFUL[family]
        else 2 * sum(record.nbytes for node in prefixes._nodes() if (record := node.state) is not None) / 3
    )
    tail = one / 36 * 2 * (BLOCK + 5)  # the last block before the branches is written with each
    assert prefixes.nbytes <= one + states + tail
    assert held_bytes(prefixes) == prefixes.nbytes
    kinds = {(entry.kind, entry.tokens) for entry in prefixes.entries()}
    assert ("session", 73) in kinds
    entry = next(entry for entry in prefixes.entries() if entry.kind == "session")
    assert prefixes.drop(entry.id)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_outlives_the_process(family: str, tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, 1 << 22)
    before = stored(family, disk=disk).lookup((*PROMPT, 3), selection_key=A)
    disk.close()
    again = prefix_cache(family, disk=DiskTier(tmp_path, 1 << 22))
    after = again.lookup((*PROMPT, 3), selection_key=A)
    assert after.length == before.length == 90
    assert same(after.cache, before.cache)
    assert positions(after.cache) == positions(before.cache)
    assert (after.held.positions == FED).all()
    assert again.lookup((*PROMPT, 3), selection_key=B) is None or again.covers(PROMPT, selection_key=B) <= 19
