"""The budget lets go of what it no longer counts, and evicts in the order that it promises."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specprefill.cache.budget import GRACE, ByteBudget, Evictable
from mlx_specprefill.cache.prefix.tree import PrefixCache
from tests.cache.prefix.stores import BLOCK, fake_caches, filled
from tests.support.examples import examples

LARGE = 1 << 30


class Kept(Evictable):
    """An entry of one byte."""

    def __init__(self, budget: ByteBudget, gone: list[Evictable]) -> None:
        super().__init__(1)
        self._budget = budget
        self._gone = gone

    def evict(self) -> None:
        self._budget.remove(self)
        self._gone.append(self)


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing but reference counts frees memory: what only the collector would find may live for minutes."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("hits", [0, 1, 2])
def test_an_entry_that_is_not_counted_any_more_is_not_held(hits: int) -> None:
    """Long before the budget is full, and whichever class it was in."""
    budget = ByteBudget(LARGE)
    with uncollected():
        entry = Kept(budget, [])
        budget.add(entry)
        for _ in range(hits):
            budget.begin_lookup()
            budget.touch(entry, hit=True)
        budget.remove(entry)
        watch = weakref.ref(entry)
        del entry
        assert watch() is None


def test_what_is_stored_has_the_room_that_memory_leaves() -> None:
    """Asked at every store: older entries go, and what still has no room is not stored."""
    budget, gone, room = ByteBudget(10), list[Evictable](), 7
    budget.room = lambda: room
    for _ in range(12):
        budget.begin_store()
        if budget.reserve(1):
            budget.add(Kept(budget, gone))
    assert (budget.used, len(gone)) == (7, 5)
    room = 4
    budget.begin_store()
    assert budget.used == 7  # nothing goes before its place is needed
    assert budget.reserve(1)
    assert budget.used == 3
    room = 0
    budget.begin_store()
    assert not budget.reserve(1)
    room = 20
    budget.begin_store()
    assert budget.limit == 10


def test_nothing_goes_for_what_has_no_room_all_the_same() -> None:
    budget, gone = ByteBudget(10), list[Evictable]()
    for count in (4, 5):
        budget.begin_store()
        for _ in range(count):
            budget.add(Kept(budget, gone))
    assert not budget.reserve(6)  # five are of this call
    assert not gone
    assert budget.reserve(5)
    assert len(gone) == 4


def test_a_budget_that_is_never_full_stays_small() -> None:
    """Entries that are replaced every turn leave nothing behind, beside entries that stay."""
    budget = ByteBudget(LARGE)
    for entry in (staying := [Kept(budget, []) for _ in range(10)]):
        budget.add(entry)
    for _ in range(5000):
        budget.begin_lookup()
        entry = Kept(budget, [])
        budget.add(entry)
        budget.touch(entry, hit=True)
        budget.remove(entry)
    assert budget.used == len(staying)
    assert sum(map(len, budget._entries)) == len(staying)


@settings(deadline=None, max_examples=examples(300))
@given(st.integers(0, 10**9))
def test_the_lowest_entry_goes_first_whatever_was_removed_before(seed: int) -> None:
    """Against the plain rule over all entries: used earliest, hits spared by the grace while they take little."""
    rng, gone = random.Random(seed), list[Evictable]()
    budget, held = ByteBudget(rng.randint(1, 30)), list[Kept]()
    for _ in range(rng.randint(1, 300)):
        budget.begin_lookup()
        what = rng.random()
        if what < 0.4 and budget.used < budget.limit:
            held.append(Kept(budget, gone))
            budget.touch(held[-1])
            budget.add(held[-1])
        elif what < 0.7 and held:
            budget.touch(rng.choice(held), hit=rng.random() < 0.5)
        elif what < 0.9 and held:
            budget.remove(held.pop(rng.randrange(len(held))))
        elif held:
            spared = GRACE if 8 * sum(bool(entry.hits) for entry in held) <= 7 * budget.limit else 0.0
            ranks = {entry: entry.used + (spared if entry.hits else 0.0) for entry in held}
            budget.shrink(1)
            assert gone[-1] in held
            assert ranks[gone[-1]] == min(ranks.values())
            held.remove(gone[-1])
        assert budget.used == len(held)
        assert budget.shared == sum(bool(entry.hits) for entry in held)


def test_cleared_caches_hold_no_arrays() -> None:
    make, budget = fake_caches(width=256), ByteBudget(LARGE)
    with uncollected():
        before = mx.get_active_memory()
        prefixes = PrefixCache("m", make, budget, block_size=BLOCK)
        for turn in range(20):
            tokens = tuple(range(100 + 10 * turn))
            prefixes.store(tokens, filled(make, tokens))
            prefixes.lookup(tokens, len(tokens) - 1)
        assert mx.get_active_memory() - before <= 1.1 * budget.used + (64 << 10)
        prefixes.clear()
        assert budget.used == 0
        assert mx.get_active_memory() - before <= 64 << 10


def test_what_lasts_goes_last_however_long_it_is_idle_up_to_half_of_the_limit() -> None:
    budget, gone = ByteBudget(10), list[Evictable]()
    pinned = [Kept(budget, gone) for _ in range(5)]
    for entry in pinned:
        budget.add(entry)
        budget.touch(entry, pin=True)
        budget.begin_lookup()
        budget.touch(entry, hit=True)
    for _ in range(5 * int(GRACE)):
        budget.begin_lookup()
        entry = Kept(budget, gone)
        assert budget.reserve(1)
        budget.touch(entry, hit=True)
        budget.add(entry)
    assert not set(pinned) & set(gone)
    once = Kept(budget, gone)
    budget.touch(once, pin=True)
    assert once.rank == 0  # nobody came back to it
    more = Kept(budget, gone)
    budget.begin_lookup()
    assert budget.reserve(1)
    budget.touch(more, hit=True, pin=True)
    budget.add(more)
    budget.begin_lookup()
    for _ in range(int(2 * GRACE)):
        budget.begin_lookup()
    assert budget.reserve(1)
    assert pinned[0] in gone  # it is the one that was used longest ago, and they are more than half now
