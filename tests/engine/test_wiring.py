"""Wired memory: none, the recommendation, or weights and caches of a model that takes most of the memory."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_specprefill import Engine, EngineConfig
from mlx_specprefill.config import WiredLimit
from mlx_specprefill.engine import wired
from mlx_specprefill.engine.wired import wired_bytes
from tests.support.tiny import tiny_pair

GB = 10**9


@pytest.mark.parametrize(
    ("choice", "weights", "caches", "memory", "recommended", "wired"),
    [
        ("off", 100 * GB, 0, 128 * GB, 96 * GB, 0),
        ("on", 1 * GB, 0, 128 * GB, 96 * GB, 96 * GB),
        ("auto", 70 * GB, 2 * GB, 128 * GB, 96 * GB, 0),  # 55 % of memory
        ("auto", 80 * GB, 2 * GB, 128 * GB, 96 * GB, 82 * GB),
        ("auto", 95 * GB, 9 * GB, 128 * GB, 96 * GB, 96 * GB),
        ("auto", 80 * GB, 2 * GB, None, 96 * GB, 0),
        ("on", 80 * GB, 2 * GB, 128 * GB, None, 0),  # a device that can't
    ],
)
def test_what_is_wired(
    choice: WiredLimit, weights: int, caches: int, memory: int | None, recommended: int | None, wired: int
) -> None:
    assert wired_bytes(choice, weights, caches, memory, recommended) == wired


@pytest.mark.parametrize(("memory", "is_wired"), [(1 << 40, False), (1 << 10, True)])
def test_an_engine_wires_what_is_large_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, memory: int, is_wired: bool
) -> None:
    limits: list[int] = []
    info: dict[str, Any] = {**mx.device_info(), "max_recommended_working_set_size": 1 << 33}
    monkeypatch.setattr(mx, "set_wired_limit", limits.append)
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(wired, "physical_memory", lambda: memory)
    with caplog.at_level("INFO"), Engine(tiny_pair(), EngineConfig(prefix_cache_bytes=1000)) as engine:
        assert bool(engine.wired) == is_wired
    assert limits == ([engine.wired] if is_wired else [])
    assert ("are wired" in caplog.text) == is_wired
