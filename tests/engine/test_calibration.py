"""Costs measured on small models: where they come from, where they are kept, and what they decide."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from mlx_specprefill import (
    Engine,
    EngineConfig,
    GenerationRequest,
    PairCost,
    Progress,
    SparseUnsupportedError,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    calibrate,
)
from mlx_specprefill.engine import calibration
from mlx_specprefill.engine.calibration import calibrated
from mlx_specprefill.prefill.cost import ModelCost, Sample
from tests import tiny

CHEAP, DEAR = ModelCost(0.0, 0.001, 0.0, 0.0, 0.0, 0.0), ModelCost(0.0, 10.0, 0.0, 0.0, 0.0, 0.0)


@pytest.fixture
def short_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_LADDER", ((64, 64), (128, 64), (256, 128)))


def config(file: Path | None = None) -> EngineConfig:
    policy = SpecPrefillPolicy(threshold=None, min_saving_ms=0.0, min_saving_share=Fraction(1, 5))
    return EngineConfig(policy=policy, calibration_file=file)


@pytest.mark.usefixtures("short_ladder")
def test_measured_costs_are_positive_and_kept_for_the_next_start(tmp_path, monkeypatch):
    pair, file = tiny.tiny_pair(), tmp_path / "deep" / "costs.json"
    cost = calibrated(pair, config(file))
    assert cost is not None
    assert cost.target.prefill_ms(1000) > 0
    assert cost.draft.prefill_ms(1000) > 0
    monkeypatch.setattr(calibration, "calibrate", lambda *_: pytest.fail("measured twice"))
    assert calibrated(pair, config(file)) == cost


@pytest.mark.usefixtures("short_ladder")
def test_another_pair_and_a_broken_file_are_measured_anew(tmp_path):
    file = tmp_path / "costs.json"
    calibrated(tiny.tiny_pair(), config(file))
    calibrated(tiny.tiny_pair("qwen3"), config(file))
    assert len(json.loads(file.read_text())) == 2
    file.write_text("{not json")
    assert calibrated(tiny.tiny_pair(), config(file)) is not None
    assert len(json.loads(file.read_text())) == 1


@pytest.mark.usefixtures("short_ladder")
@pytest.mark.parametrize("entry", [{"target": {"token_ms": 1.0}, "draft": {}}, {"target": {}}, [], 1])
def test_what_another_version_wrote_is_measured_anew(tmp_path, entry):
    file = tmp_path / "costs.json"
    calibrated(tiny.tiny_pair(), config(file))
    (key,) = json.loads(file.read_text())
    file.write_text(json.dumps({key: entry}))
    assert calibrated(tiny.tiny_pair(), config(file)) is not None
    assert json.loads(file.read_text())[key] != entry


@pytest.mark.usefixtures("short_ladder")
def test_a_folder_that_cannot_be_written_costs_nothing_but_the_keeping(tmp_path):
    (tmp_path / "file").write_text("")
    assert calibrated(tiny.tiny_pair(), config(tmp_path / "file" / "costs.json")) is not None


def test_a_failing_measurement_leaves_the_length_to_decide(monkeypatch):
    monkeypatch.setattr(calibration, "calibrate", lambda *_: 1 / 0)
    assert calibrated(tiny.tiny_pair(), config()) is None


@pytest.mark.usefixtures("short_ladder")
def test_a_disturbed_forward_does_not_count(monkeypatch):
    quiet = [Sample(n, n * i, 0.5 * n) for n in (64, 128) for i in range(2)]
    disturbed = [replace(sample, ms=9 * sample.ms) for sample in quiet]
    readings = iter([quiet, disturbed, disturbed, quiet])
    monkeypatch.setattr(
        calibration, "_climb", lambda *_: calibration._Samples(next(readings), [Sample(1, 128, 3.0)], seconds=1.0)
    )
    cost = calibrate(tiny.tiny_pair(), config())
    assert cost.target.prefill_ms(129, 0, 64) == pytest.approx(0.5 * 128 + 3.0)
    assert cost.draft.prefill_ms(129, 0, 64) == pytest.approx(0.5 * 128 + 3.0)


def test_without_a_draft_there_is_nothing_to_measure():
    pair = replace(tiny.tiny_pair(), draft=None)
    assert calibrated(pair, config()) is None
    with pytest.raises(SparseUnsupportedError):
        calibrate(pair, config())


@pytest.mark.parametrize(("draft", "mode"), [(CHEAP, "sparse"), (DEAR, "full")])
def test_the_engine_goes_sparse_only_where_the_prediction_pays(monkeypatch, draft, mode):
    monkeypatch.setattr("mlx_specprefill.engine.planning.calibrated", lambda *_: PairCost(DEAR, draft))
    with Engine(tiny.tiny_pair(), config()) as engine:
        *_, last = engine.generate(GenerationRequest(tuple(tiny.random_prompt(300)), 1))
    assert last.account.mode == mode
    assert last.account.predicted is not None
    assert last.account.to_dict()["predicted"]["full_ms"] == pytest.approx(2990, rel=0.02)
    assert ("too little to gain" in last.account.reason) == (mode == "full")


@pytest.mark.parametrize(("square_ms", "longest"), [(0.0, 512), (0.1, 128)])
def test_slices_are_no_longer_than_what_was_measured_to_pay(monkeypatch, square_ms, longest):
    target = ModelCost(0.0, 1.0, 0.0, square_ms, 0.0, 0.0)
    monkeypatch.setattr("mlx_specprefill.engine.planning.calibrated", lambda *_: PairCost(target, DEAR))
    rule = replace(config(), prefill_step=512, slice_target_ms=1e6)
    request = GenerationRequest(tuple(tiny.random_prompt(1500)), 1, specprefill=SpecPrefillOptions(enabled=False))
    with Engine(tiny.tiny_pair(), rule) as engine:
        done = [event.done for event in engine.generate(request) if isinstance(event, Progress)]
    assert max(np.diff(done)) == longest


def test_a_threshold_measures_nothing(monkeypatch):
    monkeypatch.setattr("mlx_specprefill.engine.planning.calibrated", lambda *_: pytest.fail("measured"))
    with Engine(tiny.tiny_pair(), EngineConfig(policy=SpecPrefillPolicy(threshold=5))) as engine:
        *_, last = engine.generate(GenerationRequest(tuple(tiny.random_prompt(300)), 1))
    assert last.account.mode == "sparse"
    assert last.account.predicted is None
