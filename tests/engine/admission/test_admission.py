"""Memory admission on plain integers."""

from __future__ import annotations

from mlx_specprefill.engine.admission.admission import Admission, Footprint, physical_memory


class Cache:
    """A prefix cache that can free what it holds."""

    def __init__(self, held):
        self.held = held

    def reclaim(self, count):
        self.held = max(0, self.held - count)


def test_reservations_add_up_and_are_released():
    admission = Admission(100, weights=40)
    assert admission.reserve(1, 30)
    assert admission.reserve(2, 30)
    assert not admission.reserve(3, 1)
    admission.release(1)
    assert admission.reserve(3, 30)
    assert admission.reserved == 60


def test_the_prefix_cache_gives_way_first():
    cache = Cache(50)
    admission = Admission(100, 20, lambda: cache.held, cache.reclaim)
    assert admission.reserve(1, 60)
    assert cache.held == 20
    assert not admission.reserve(2, 21)
    assert admission.reserve(2, 20)
    assert cache.held == 0


def test_work_in_the_background_evicts_nothing():
    cache = Cache(50)
    admission = Admission(100, 20, lambda: cache.held, cache.reclaim)
    assert not admission.reserve_free(1, 31)
    assert cache.held == 50
    assert admission.reserve_free(1, 30)
    assert admission.reserved == 30
    assert not admission.fits(1)


def test_what_can_never_fit_is_told_apart_from_what_must_wait():
    admission = Admission(100, 40)
    assert admission.can_ever(60)
    assert not admission.can_ever(61)
    assert admission.reserve(1, 60)
    assert admission.can_ever(60)
    assert not admission.reserve(2, 60)


def test_without_a_limit_everything_fits():
    admission = Admission(None, 10**15)
    assert admission.can_ever(10**18)
    assert admission.reserve(1, 10**18)


def test_releasing_twice_or_unknown_is_harmless():
    admission = Admission(10, 0)
    admission.release(5)
    assert admission.reserve(1, 10)
    admission.release(1)
    admission.release(1)
    assert admission.reserved == 0


def test_a_sequence_costs_its_tokens_its_state_and_one_forward():
    assert Footprint(per_token=10, constant=500, activation=70).of(100) == 1570


def test_physical_memory_is_known_here():
    assert physical_memory() > 2**28
