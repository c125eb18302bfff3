"""Idle work waits while the machine runs on battery."""

from __future__ import annotations

import threading
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace

import psutil
import pytest

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Finished,
    GenerationRequest,
    SpecPrefillOptions,
    SpecPrefillPolicy,
)
from mlx_specprefill.engine.thread import battery, loop
from mlx_specprefill.engine.thread.battery import Battery
from tests.support.tiny import random_prompt, tiny_pair
from tests.support.waiting import eventually

POLICY = SpecPrefillPolicy(threshold=200, keep_pct=Fraction(3, 10))


class Sensors:
    """A machine's battery; None: it has none."""

    def __init__(self) -> None:
        self.is_plugged: bool | None = True
        self.exists = True
        self.looks = 0

    def __call__(self) -> SimpleNamespace | None:
        self.looks += 1
        return SimpleNamespace(power_plugged=self.is_plugged) if self.exists else None


@pytest.fixture
def sensors(monkeypatch: pytest.MonkeyPatch) -> Sensors:
    found = Sensors()
    monkeypatch.setattr(psutil, "sensors_battery", found)
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the monotonic clock."""
    now = [1000.0]
    monkeypatch.setattr(battery, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


@pytest.mark.parametrize(("plugged", "used"), [(True, False), (None, False), (False, True)])
def test_it_is_in_use_when_it_is_not_plugged_in(sensors: Sensors, plugged: bool | None, used: bool) -> None:
    sensors.is_plugged = plugged
    assert Battery().is_in_use is used


def test_a_machine_without_one(sensors: Sensors) -> None:
    sensors.exists = False
    assert not Battery().is_in_use


def test_it_is_looked_at_every_half_minute(sensors: Sensors, clock: Callable[[float], None]) -> None:
    watched = Battery()
    assert not watched.is_in_use
    sensors.is_plugged = False
    clock(29.0)
    assert (watched.is_in_use, sensors.looks) == (False, 1)
    clock(1.0)
    assert (watched.is_in_use, sensors.looks) == (True, 2)


def sparse_turn(engine: Engine) -> None:
    ended = threading.Event()
    request = GenerationRequest(random_prompt(500, 0), 3, specprefill=SpecPrefillOptions(enabled=True))
    engine.submit(request, lambda event: ended.set() if isinstance(event, Finished) else None)
    assert ended.wait(60)


def engine_with(policy: SpecPrefillPolicy) -> Engine:
    return Engine(tiny_pair(), EngineConfig(policy=policy, prefill_step=128, prefix_cache_bytes=64 << 20))


def test_a_sparse_turn_is_made_dense_once_the_machine_is_plugged_in(
    sensors: Sensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(battery, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(loop, "_QUIET_S", 0.0)
    sensors.is_plugged = False
    with engine_with(POLICY) as engine:
        sparse_turn(engine)
        looks = sensors.looks
        assert eventually(lambda: sensors.looks >= looks + 3, 60)
        assert engine.stats().densified == 0
        assert engine.loop.rest_s > 0  # the thread does not spin
        sensors.is_plugged = True
        assert eventually(lambda: engine.stats().densified == 1, 60)


def test_on_request_the_battery_is_used(sensors: Sensors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_QUIET_S", 0.0)
    sensors.is_plugged = False
    with engine_with(SpecPrefillPolicy(threshold=200, keep_pct=Fraction(3, 10), on_battery=True)) as engine:
        sparse_turn(engine)
        assert eventually(lambda: engine.stats().densified == 1, 60)
    assert sensors.looks == 0
