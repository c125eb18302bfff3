"""Costs measured on small models: where they come from, where they are kept, and what they decide."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mlx_specprefill import (
    Engine,
    EngineConfig,
    GenerationRequest,
    ModelPair,
    PairCost,
    Progress,
    SparseUnsupportedError,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    calibrate,
)
from mlx_specprefill.engine.admission import time_calibration as calibration
from mlx_specprefill.engine.admission.cost import ModelCost
from mlx_specprefill.engine.admission.time_calibration import calibrated
from tests import tiny

CHEAP, DEAR = ModelCost(0.0, 0.001, 0.0, 0.0, 0.0, 0.0, 1), ModelCost(0.0, 10.0, 0.0, 0.0, 0.0, 0.0, 1)


@pytest.fixture
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_STEPS", (64, 128))
    monkeypatch.setattr(calibration, "_SHORTER", 32)
    monkeypatch.setattr(calibration, "_TRIED", 128)
    monkeypatch.setattr(calibration, "_LONG", 192)


def config(file: Path | None = None) -> EngineConfig:
    policy = SpecPrefillPolicy(threshold=None, min_saving_ms=0.0, min_saving_share=Fraction(1, 5))
    return EngineConfig(policy=policy, calibration_file=file)


@pytest.mark.usefixtures("short_prompts")
def test_measured_costs_are_positive_and_kept_for_the_next_start(tmp_path, monkeypatch):
    pair, file = tiny.tiny_pair(), tmp_path / "deep" / "costs.json"
    cost = calibrated(pair, config(file))
    assert cost is not None
    assert cost.target.prefill_ms(1000) > 0
    assert cost.draft.prefill_ms(1000) > 0
    monkeypatch.setattr(calibration, "calibrate", lambda *_: pytest.fail("measured twice"))
    assert calibrated(pair, config(file)) == cost


@pytest.mark.usefixtures("short_prompts")
def test_another_pair_and_a_broken_file_are_measured_anew(tmp_path):
    file = tmp_path / "costs.json"
    calibrated(tiny.tiny_pair(), config(file))
    calibrated(tiny.tiny_pair("qwen3"), config(file))
    assert len(json.loads(file.read_text())) == 2
    file.write_text("{not json")
    assert calibrated(tiny.tiny_pair(), config(file)) is not None
    assert len(json.loads(file.read_text())) == 1


@pytest.mark.usefixtures("short_prompts")
@pytest.mark.parametrize("entry", [{"target": {"token_ms": 1.0}, "draft": {}}, {"target": {}}, [], 1])
def test_what_another_version_wrote_is_measured_anew(tmp_path, entry):
    file = tmp_path / "costs.json"
    calibrated(tiny.tiny_pair(), config(file))
    (key,) = json.loads(file.read_text())
    file.write_text(json.dumps({key: entry}))
    assert calibrated(tiny.tiny_pair(), config(file)) is not None
    assert json.loads(file.read_text())[key] != entry


@pytest.mark.usefixtures("short_prompts")
def test_a_folder_that_cannot_be_written_costs_nothing_but_the_keeping(tmp_path):
    (tmp_path / "file").write_text("")
    assert calibrated(tiny.tiny_pair(), config(tmp_path / "file" / "costs.json")) is not None


def test_a_failing_measurement_leaves_the_length_to_decide(monkeypatch):
    monkeypatch.setattr(calibration, "calibrate", lambda *_: 1 / 0)
    assert calibrated(tiny.tiny_pair(), config()) is None


TARGET = ModelCost(
    fixed_ms=4.0, token_ms=0.3, pair_ms=2e-4, square_ms=3e-4, end_ms=40.0, end_token_ms=1e-2, end_tokens=32
)
DRAFT = ModelCost(
    fixed_ms=4.0, token_ms=0.05, pair_ms=8e-5, square_ms=9e-5, end_ms=40.0, end_token_ms=5e-3, end_tokens=1
)


class Machine:
    """Models whose forwards take what a law says, by a clock that nothing else moves.

    Attributes:
        slower: for how many times as long as the law says, asked for every forward.
        beyond: (tokens, times as long): forwards of more tokens take that many times as long.
        readings: (prompt tokens, tokens per forward, seconds) of each, as far as it came.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: ModelCost, draft: ModelCost) -> None:
        self.slower: Callable[[], float] = lambda: 1.0
        self.beyond = (1 << 20, 1.0)
        self.readings: list[tuple[int, int, float]] = []
        self._ms = 0.0
        monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: self._ms / 1e3))
        monkeypatch.setattr(calibration, "prefill", lambda *given: self._run(target, given[2], given[4]))
        scorer = SimpleNamespace(score=lambda _, task: self._run(draft, task.prompt.tolist(), task.step()))
        monkeypatch.setattr(calibration, "scorer_for", lambda *_: scorer)

    def _run(self, law: ModelCost, tokens: list[int], step: int) -> Iterator[Progress]:
        start, last, began = 0, len(tokens) - law.end_tokens, self._ms
        try:
            while start < last:
                n = min(step, last - start)
                ms = law.fixed_ms + law.token_ms * n + law.pair_ms * n * start + law.square_ms * n * n
                self._ms += ms * self.slower() * (self.beyond[1] if n > self.beyond[0] else 1.0)
                start += n
                yield Progress("prefill", start, len(tokens))
            self._ms += law.end_ms + law.end_token_ms * len(tokens)
            yield Progress("prefill", len(tokens), len(tokens))
        finally:
            self.readings.append((len(tokens), step, (self._ms - began) / 1e3))


def best_step(law: ModelCost) -> int:
    """The longest of those that are within 2 % of the fastest."""
    times = {step: law.prefill_ms(2048, step=step) for step in (128, 256, 512, 1024, 2048)}
    return max(step for step, ms in times.items() if ms <= 1.02 * min(times.values()))


def worst_error(cost: PairCost) -> float:
    """Of predictions for both ways to read prompts up to 32768 tokens."""
    law = PairCost(TARGET, DRAFT, cost.target_step, cost.draft_step)
    errors = [0.0]
    for tokens in (1024, 4096, 8192, 32768):
        found, true = cost.predict(tokens, tokens // 5), law.predict(tokens, tokens // 5)
        errors += [abs(found.full_ms / true.full_ms - 1), abs(found.sparse_ms / true.sparse_ms - 1)]
    return max(errors)


def test_a_calibration_finds_the_law_of_the_machine_and_its_best_steps(monkeypatch):
    machine = Machine(monkeypatch, TARGET, DRAFT)
    cost = calibrate(wide_pair(), config())
    assert worst_error(cost) < 1e-6
    assert (cost.target_step, cost.draft_step) == (best_step(TARGET), best_step(DRAFT)) == (256, 256)
    assert (8192, cost.target_step) in [(tokens, step) for tokens, step, _ in machine.readings]


@pytest.mark.parametrize("seed", range(10))
def test_forwards_that_other_work_disturbs_do_not_count(monkeypatch, seed):
    """A third of them takes up to four times as long, all of them a few per cent more or less."""
    rng = np.random.default_rng(seed)
    machine = Machine(monkeypatch, TARGET, DRAFT)
    machine.slower = lambda: rng.uniform(0.97, 1.03) * (rng.uniform(1.2, 4.0) if rng.random() < 1 / 3 else 1.0)
    assert worst_error(calibrate(wide_pair(), config())) < 0.08


@pytest.mark.parametrize(("square", "expected"), [(0.5, 2048), (0.8, 512), (3.0, 128)])
def test_long_forwards_where_they_pay(monkeypatch, square, expected):
    """Half of the pair's cost: attention skips what is masked."""
    law = ModelCost(5.0, 0.1, 2e-4, square * 2e-4, 3.0, 1e-4, 1)
    Machine(monkeypatch, law, law)
    cost = calibrate(wide_pair(), config())
    assert cost.target_step == best_step(law) == expected


def test_a_draft_takes_no_longer_steps_than_its_target(monkeypatch):
    """A forward's activations grow with them, and a sparse prefill should never need more memory than a full one."""
    skipping = replace(DRAFT, square_ms=0.0)
    assert best_step(skipping) == 2048
    Machine(monkeypatch, TARGET, skipping)
    cost = calibrate(wide_pair(), config())
    assert (cost.target_step, cost.draft_step) == (256, 256)


def test_forwards_longer_than_the_best_ones_may_follow_another_law(monkeypatch):
    """Their scores do not fit the processor's cache any more."""
    machine = Machine(monkeypatch, TARGET, DRAFT)
    machine.beyond = (256, 2.5)
    assert worst_error(calibrate(wide_pair(), config())) < 1e-6


def test_a_slow_machine_is_measured_in_bounded_time(monkeypatch):
    machine = Machine(monkeypatch, replace(TARGET, token_ms=20.0), DRAFT)
    cost = calibrate(wide_pair(), config())
    assert cost.target.prefill_ms(8192, step=256) == pytest.approx(20.0 * 8192, rel=0.1)
    assert max(seconds for _, _, seconds in machine.readings) < 12


def wide_pair() -> ModelPair:
    return replace(tiny.tiny_pair(), context_length=1 << 15, draft_context=None)


def test_without_a_draft_there_is_nothing_to_measure():
    pair = replace(tiny.tiny_pair(), draft=None)
    assert calibrated(pair, config()) is None
    with pytest.raises(SparseUnsupportedError):
        calibrate(pair, config())


@pytest.mark.parametrize(("draft", "mode"), [(CHEAP, "sparse"), (DEAR, "full")])
def test_the_engine_goes_sparse_only_where_the_prediction_pays(monkeypatch, draft, mode):
    monkeypatch.setattr(
        "mlx_specprefill.engine.admission.planner.calibrated", lambda *_: PairCost(DEAR, draft, 256, 256)
    )
    with Engine(tiny.tiny_pair(), config()) as engine:
        *_, last = engine.generate(GenerationRequest(tuple(tiny.random_prompt(300)), 1))
    assert last.account.mode == mode
    assert last.account.predicted is not None
    assert last.account.to_dict()["predicted"]["full_ms"] == pytest.approx(2990, rel=0.02)
    assert ("too little to gain" in last.account.reason) == (mode == "full")


@pytest.mark.parametrize(("step", "longest"), [(2048, 512), (128, 128)])
def test_slices_are_no_longer_than_what_was_measured_to_pay(monkeypatch, step, longest):
    monkeypatch.setattr(
        "mlx_specprefill.engine.admission.planner.calibrated", lambda *_: PairCost(DEAR, DEAR, step, step)
    )
    rule = replace(config(), prefill_step=512, slice_target_ms=1e6)
    request = GenerationRequest(tuple(tiny.random_prompt(1500)), 1, specprefill=SpecPrefillOptions(enabled=False))
    with Engine(tiny.tiny_pair(), rule) as engine:
        done = [event.done for event in engine.generate(request) if isinstance(event, Progress)]
    assert max(np.diff(done)) == longest


def test_a_threshold_measures_nothing(monkeypatch):
    monkeypatch.setattr("mlx_specprefill.engine.admission.planner.calibrated", lambda *_: pytest.fail("measured"))
    with Engine(tiny.tiny_pair(), EngineConfig(policy=SpecPrefillPolicy(threshold=5))) as engine:
        *_, last = engine.generate(GenerationRequest(tuple(tiny.random_prompt(300)), 1))
    assert last.account.mode == "sparse"
    assert last.account.predicted is None


def test_measuring_that_is_given_up_keeps_nothing(tmp_path):
    asked = iter([False, False, True])
    assert calibrated(tiny.tiny_pair(), config(tmp_path / "costs.json"), lambda: next(asked)) is None
    assert not (tmp_path / "costs.json").exists()


def test_what_others_take_between_two_forwards_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def read(tokens: list[int], step: int) -> Iterator[Progress]:
        for done in range(step, len(tokens) + 1, step):
            clock[0] += 0.5
            yield Progress("draft", done, len(tokens))

    def pause() -> None:
        clock[0] += 100.0

    found = calibration._read(read, [0] * 40, 10, pause)  # type: ignore[arg-type]
    assert [sample.ms for sample in found.forwards] == [500.0] * 3
    assert [sample.ms for sample in found.ends] == [500.0]
    assert found.seconds == 2.0
