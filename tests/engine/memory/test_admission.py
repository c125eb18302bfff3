"""Memory admission on plain integers."""

from __future__ import annotations

import math
from types import SimpleNamespace

from mlx_specprefill import EngineConfig, GenerationRequest
from mlx_specprefill.engine.memory.machine import physical_memory
from mlx_specprefill.engine.memory.reservations import Memory
from mlx_specprefill.engine.requests.job import Need
from mlx_specprefill.loading.footprint import MOST_PAIRS, Footprint


class Cache:
    """A prefix cache that can free what it holds."""

    def __init__(self, nbytes):
        self.nbytes = nbytes
        self.budget = self

    def shrink(self, count):
        self.nbytes = max(0, self.nbytes - count)


def memory_of(limit, weights, cache=None):
    memory = Memory(SimpleNamespace(context_length=1), EngineConfig(), cache or Cache(0))
    memory.limit, memory.weights = limit, weights
    return memory


def test_reservations_add_up_and_are_released():
    memory = memory_of(100, 40)
    assert memory.reserve(1, Need(30))
    assert memory.reserve(2, Need(30))
    assert not memory.reserve(3, Need(1))
    memory.release(1)
    assert memory.reserve(3, Need(30))
    assert memory.reserved == 60


def test_the_prefix_cache_gives_way_first():
    cache = Cache(50)
    memory = memory_of(100, 20, cache)
    assert memory.reserve(1, Need(60))
    assert cache.nbytes == 20
    assert not memory.reserve(2, Need(21))
    assert memory.reserve(2, Need(20))
    assert cache.nbytes == 0


def test_a_request_that_does_not_fit_all_the_same_evicts_nothing():
    cache = Cache(50)
    memory = memory_of(100, 20, cache)
    assert memory.reserve(1, Need(40, 5))
    assert cache.nbytes == 35
    for need in (Need(41), Need(30, 21), Need(1000)):
        assert not memory.reserve(2, need)
    assert cache.nbytes == 35
    assert memory.reserve(2, Need(30, 9))  # the first one has 5 of those
    assert cache.nbytes == 1


def test_prefixes_have_the_room_that_weights_and_requests_leave():
    memory = memory_of(100, 20, Cache(10))
    memory.reserve(1, Need(25, 5))
    assert memory.room_for_prefixes() == 50
    memory.release(1)
    assert memory.room_for_prefixes() == 80
    memory.limit = None
    assert memory.room_for_prefixes() == math.inf


def test_work_in_the_background_evicts_nothing():
    cache = Cache(50)
    memory = memory_of(100, 20, cache)
    assert not memory.reserve_free(1, Need(31))
    assert cache.nbytes == 50
    assert memory.reserve_free(1, Need(30))
    assert memory.reserved == 30
    assert not memory.fits(Need(1))


def test_what_can_never_fit_is_told_apart_from_what_must_wait():
    memory = memory_of(100, 40)
    request = GenerationRequest((0,), 0)
    for held, fits in ((60, True), (61, False)):
        memory.need = lambda request, mode, held=held: Need(held)
        assert memory.can_ever(request, "full") == fits
    assert memory.reserve(1, Need(60))
    assert not memory.reserve(2, Need(60))


def test_without_a_limit_everything_fits():
    memory = memory_of(None, 10**15)
    assert memory.reserve(1, Need(10**18))


def test_releasing_twice_or_unknown_is_harmless():
    memory = memory_of(10, 0)
    memory.release(5)
    assert memory.reserve(1, Need(10))
    memory.release(1)
    memory.release(1)
    assert memory.reserved == 0


def test_forwards_take_turns_and_share_the_memory_of_the_largest():
    memory = memory_of(100, 20)
    assert memory.reserve(1, Need(10, 30))
    assert memory.reserve(2, Need(10, 20))
    assert memory.reserved == 50
    assert not memory.fits(Need(10, 51))
    assert memory.reserve(3, Need(10, 50))
    assert memory.reserved == 80
    memory.release(3)
    assert memory.reserved == 50


def test_a_sequence_costs_its_tokens_its_state_and_one_forward():
    footprint = Footprint(per_token=10, constant=500, per_row=7, per_pair=2)
    assert footprint.of_held(100) == 1500
    assert footprint.working(100, 2048) == 100 * 7 + 100 * 100 * 2
    assert footprint.working(10_000, 2048) == 2048 * 7 + 2048 * 10_000 * 2
    assert footprint.working(1_000_000, 2048) == 2048 * 7 + MOST_PAIRS * 2


def test_physical_memory_is_known_here():
    assert physical_memory() > 2**28
