"""The times that a start predicts: nothing before this machine has been measured."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_specprefill import Engine, EngineConfig, ModelPair, about
from mlx_specprefill_server.models.service import Service
from mlx_specprefill_server.running.greeting import expected_times, greeting
from mlx_specprefill_server.settings.server import Settings
from tests.support.tiny import tiny_pair


@pytest.fixture
def pair() -> ModelPair:
    return replace(tiny_pair(), context_length=16384, draft_context=16384)


def said(pair: ModelPair, folder: Path, ms_per_token: dict[str, float]) -> list[str]:
    """Start, say what is known, and let forwards take these times before the end."""
    with Engine(pair, EngineConfig(calibration_file=folder / "costs.json")) as engine:
        lines = list(expected_times(Service(engine, Settings())))
        for kind, each in ms_per_token.items():
            for tokens in (256, 1024, 2048) * 5:
                engine.costs.observe(kind, tokens, 0, tokens * each)
    return lines


def test_the_second_start_says_how_long_a_prompt_will_take(pair: ModelPair, tmp_path: Path) -> None:
    assert said(pair, tmp_path, {"target": 2.0}) == []
    assert said(pair, tmp_path, {"draft": 0.1}) == []  # the draft is not known yet
    (line,) = said(pair, tmp_path, {})
    found = re.fullmatch(r"8K: about ([\d.]+) s in full, about ([\d.]+) s sparse, predicted", line)
    assert 15 <= float(found[1]) <= 18  # 8192 tokens of 2 ms
    assert 3.5 <= float(found[2]) <= 5  # a fifth of them, and all by the draft


def test_times_that_have_just_doubled_are_told_to_nobody(pair: ModelPair, tmp_path: Path) -> None:
    said(pair, tmp_path, {"target": 2.0, "draft": 0.1})
    with Engine(pair, EngineConfig(calibration_file=tmp_path / "costs.json")) as engine:
        before = engine.predict(8192, 1638)
        for tokens in (256, 1024, 2048) * 10:
            engine.costs.observe("target", tokens, 0, tokens * 5.0)
        after = engine.predict(8192, 1638)
        assert list(expected_times(Service(engine, Settings()))) == []
    assert (before.steady, after.steady) == (True, False)
    assert before.words == "predicted about 4 s sparse, about 15 s full"
    assert not re.search(r"\d", after.words)


@pytest.mark.parametrize(
    ("ms", "words"),
    [(12, "0.01 s"), (260, "0.3 s"), (1_300, "1.5 s"), (18_400, "20 s"), (360_000, "6 min"), (6e7, "15 h")],
)
def test_predicted_times_are_rounded(ms: float, words: str) -> None:
    assert about(ms) == f"about {words}"


def test_the_first_lines_of_a_server_say_it(pair: ModelPair, tmp_path: Path) -> None:
    said(pair, tmp_path, {"target": 2.0, "draft": 0.1})
    with Engine(pair, EngineConfig(calibration_file=tmp_path / "costs.json")) as engine:
        service = Service(engine, Settings())
        default, state = SimpleNamespace(service=service), SimpleNamespace(settings=service.settings)
        served: Any = SimpleNamespace(several=False, default=default, state=state)
        lines = list(greeting(served, []))
        assert set(expected_times(service)) == set(lines[1:])
    assert len(lines) == 2


def test_a_pair_that_reads_in_full_has_one_time(pair: ModelPair, tmp_path: Path) -> None:
    pair = replace(pair, sparse_refusal="it ignores positions")
    said(pair, tmp_path, {"target": 2.0, "draft": 0.1})
    (line,) = said(pair, tmp_path, {})
    assert line.endswith(" s in full, predicted")
    assert list(said(replace(pair, context_length=4096), tmp_path, {})) == []
