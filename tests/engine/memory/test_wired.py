"""Wired memory: none, the recommendation, or the weights of all models."""

from __future__ import annotations

import platform
from typing import Any

import mlx.core as mx
import pytest

from mlx_specprefill import Engine
from mlx_specprefill.config import WiredLimit
from mlx_specprefill.engine.memory.wired import wired_bytes
from mlx_specprefill.engine.thread.mlx_thread import MLXThread
from mlx_specprefill.loading.footprint import weights_by_array
from tests.support.tiny import tiny_pair

GB = 10**9


@pytest.mark.parametrize(
    ("choice", "weights", "recommended", "wired"),
    [
        ("off", 100 * GB, 96 * GB, 0),
        ("on", 1 * GB, 96 * GB, 96 * GB),
        ("auto", 5 * GB, 96 * GB, 5 * GB),  # whatever their share of memory
        ("auto", 99 * GB, 96 * GB, 96 * GB),
        ("on", 80 * GB, None, 0),  # a device that can't
        ("auto", 80 * GB, None, 0),
    ],
)
def test_what_is_wired(choice: WiredLimit, weights: int, recommended: int | None, wired: int) -> None:
    assert wired_bytes(choice, weights, recommended) == wired


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The limits that are set, on a device that can wire."""
    found: list[int] = []
    info: dict[str, Any] = {**mx.device_info(), "max_recommended_working_set_size": 1 << 33}
    monkeypatch.setattr(mx, "set_wired_limit", found.append)
    monkeypatch.setattr(mx, "device_info", lambda: info)
    return found


@pytest.mark.parametrize(("release", "is_wired"), [("15.1", True), ("26.0", True), ("14.7", False), ("", False)])
def test_an_engine_wires_its_weights_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limits: list[int],
    release: str,
    is_wired: bool,
) -> None:
    monkeypatch.setattr(platform, "mac_ver", lambda: (release, ("", "", ""), ""))
    pair = tiny_pair()
    with caplog.at_level("INFO"), Engine(pair) as engine:
        assert engine.wired == is_wired * sum(weights_by_array(pair.target, pair.draft).values())
    assert limits == ([engine.wired] if is_wired else [])
    assert ("are wired" in caplog.text) == is_wired


def test_several_models_are_wired_together(monkeypatch: pytest.MonkeyPatch, limits: list[int]) -> None:
    monkeypatch.setattr(platform, "mac_ver", lambda: ("15.0", ("", "", ""), ""))
    thread, pairs = MLXThread(None), [tiny_pair("llama"), tiny_pair("qwen3")]
    thread.start()
    try:
        with Engine(pairs[0], thread=thread), Engine(pairs[1], thread=thread):
            each = [sum(weights_by_array(pair.target, pair.draft).values()) for pair in pairs]
    finally:
        thread.close()
    assert limits == [each[0], sum(each)]
