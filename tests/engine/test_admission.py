"""Memory admission on plain integers."""

from __future__ import annotations

from mlx_specprefill.engine.footprint import MOST_PAIRS, Admission, Footprint, physical_memory
from mlx_specprefill.engine.sequence import Need


class Cache:
    """A prefix cache that can free what it holds."""

    def __init__(self, held):
        self.held = held

    def reclaim(self, count):
        self.held = max(0, self.held - count)


def test_reservations_add_up_and_are_released():
    admission = Admission(100, weights=40)
    assert admission.reserve(1, Need(30))
    assert admission.reserve(2, Need(30))
    assert not admission.reserve(3, Need(1))
    admission.release(1)
    assert admission.reserve(3, Need(30))
    assert admission.reserved == 60


def test_the_prefix_cache_gives_way_first():
    cache = Cache(50)
    admission = Admission(100, 20, lambda: cache.held, cache.reclaim)
    assert admission.reserve(1, Need(60))
    assert cache.held == 20
    assert not admission.reserve(2, Need(21))
    assert admission.reserve(2, Need(20))
    assert cache.held == 0


def test_work_in_the_background_evicts_nothing():
    cache = Cache(50)
    admission = Admission(100, 20, lambda: cache.held, cache.reclaim)
    assert not admission.reserve_free(1, Need(31))
    assert cache.held == 50
    assert admission.reserve_free(1, Need(30))
    assert admission.reserved == 30
    assert not admission.fits(Need(1))


def test_what_can_never_fit_is_told_apart_from_what_must_wait():
    admission = Admission(100, 40)
    assert admission.can_ever(Need(60))
    assert not admission.can_ever(Need(61))
    assert admission.reserve(1, Need(60))
    assert admission.can_ever(Need(60))
    assert not admission.reserve(2, Need(60))


def test_without_a_limit_everything_fits():
    admission = Admission(None, 10**15)
    assert admission.can_ever(Need(10**18))
    assert admission.reserve(1, Need(10**18))


def test_releasing_twice_or_unknown_is_harmless():
    admission = Admission(10, 0)
    admission.release(5)
    assert admission.reserve(1, Need(10))
    admission.release(1)
    admission.release(1)
    assert admission.reserved == 0


def test_forwards_take_turns_and_share_the_memory_of_the_largest():
    admission = Admission(100, 20)
    assert admission.reserve(1, Need(10, 30))
    assert admission.reserve(2, Need(10, 20))
    assert admission.reserved == 50
    assert not admission.fits(Need(10, 51))
    assert admission.reserve(3, Need(10, 50))
    assert admission.reserved == 80
    admission.release(3)
    assert admission.reserved == 50
    assert not admission.can_ever(Need(10, 71))


def test_a_sequence_costs_its_tokens_its_state_and_one_forward():
    footprint = Footprint(per_token=10, constant=500, per_row=7, per_pair=2)
    assert footprint.of_held(100) == 1500
    assert footprint.working(100, 2048) == 100 * 7 + 100 * 100 * 2
    assert footprint.working(10_000, 2048) == 2048 * 7 + 2048 * 10_000 * 2
    assert footprint.working(1_000_000, 2048) == 2048 * 7 + MOST_PAIRS * 2


def test_physical_memory_is_known_here():
    assert physical_memory() > 2**28
