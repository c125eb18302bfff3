"""A pair without a map gets one in idle time, for the next start. The fit gives way to everything else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mlx_specprefill import Engine, EngineConfig, GenerationRequest, SpecPrefillOptions, SpecPrefillPolicy, keep_pct
from mlx_specprefill.calibration.fitting_estimates import fit_file, with_estimates
from mlx_specprefill.engine import estimating
from mlx_specprefill.engine.estimating import EstimatesState
from mlx_specprefill.events import Progress
from tests.engine.test_estimates import drafted_by_first_layers, random_map
from tests.support.tiny import generated, random_prompt
from tests.support.waiting import eventually

STEPS = 40


class ShortFit:
    """A fit of forty steps, whose map is random."""

    nbytes = 1000
    helps = True
    begun = 0

    def __init__(self, pair, step):
        self._pair = pair

    def steps(self):
        type(self).begun += 1
        for done in range(STEPS):
            time.sleep(0.01)
            yield Progress("draft", done, STEPS)
        return random_map(self._pair) if self.helps else None


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimating, "EstimateFit", ShortFit)
    monkeypatch.setattr("mlx_specprefill.engine.thread.loop._QUIET_S", 0.0)
    monkeypatch.setattr(ShortFit, "begun", 0)
    monkeypatch.setattr(ShortFit, "helps", True)


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(fits_folder=folder, policy=SpecPrefillPolicy(estimate=True))


def asked(seed: int) -> GenerationRequest:
    return GenerationRequest(random_prompt(200, seed), 4, specprefill=SpecPrefillOptions(True, keep_pct("0.3")))


def state_of(engine: Engine) -> EstimatesState:
    return engine.prefiller.estimating.state


def test_a_map_is_fitted_after_the_first_answer_and_kept(tmp_path: Path) -> None:
    pair, config = (
        drafted_by_first_layers("llama"),
        config_of(tmp_path),
    )
    with Engine(pair, config) as engine:
        time.sleep(0.2)
        assert state_of(engine).state == "to be fitted"
        assert ShortFit.begun == 0
        assert generated(engine.generate(asked(1)))[1].report.estimated_tokens == 0
        assert eventually(lambda: state_of(engine).state == "fitted")
        assert eventually(lambda: engine.memory.reserved == 0)
    again = with_estimates(pair, None, tmp_path)
    assert again.estimates is not None
    with Engine(again, config) as engine:
        assert generated(engine.generate(asked(1)))[1].report.estimated_tokens > 0
    assert ShortFit.begun == 1


def test_requests_and_turns_interrupt_it_and_it_goes_on(tmp_path: Path) -> None:
    with Engine(drafted_by_first_layers("llama"), config_of(tmp_path)) as engine:
        for seed in range(6):  # each leaves a turn to be made dense
            generated(engine.generate(asked(seed)))
            time.sleep(0.05)
        assert eventually(lambda: engine.stats().densified == 6)
        assert eventually(lambda: state_of(engine).state == "fitted")
    assert ShortFit.begun == 1


def test_memory_is_given_back_to_a_request(tmp_path: Path) -> None:
    with Engine(drafted_by_first_layers("llama"), config_of(tmp_path)) as engine:
        generated(engine.generate(asked(0)))
        assert eventually(lambda: ShortFit.begun == 1)
        engine._inbox.call(engine.memory.stop_background)
        assert eventually(lambda: engine.memory.reserved == 0)
        assert eventually(lambda: state_of(engine).state == "fitted")
    assert ShortFit.begun == 2


def test_a_pair_that_gains_nothing_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShortFit, "helps", False)
    pair = drafted_by_first_layers("llama")
    for _ in range(2):
        with Engine(
            with_estimates(pair, None, tmp_path),
            config_of(tmp_path),
        ) as engine:
            generated(engine.generate(asked(0)))
            assert eventually(lambda: state_of(engine).state == "none")
            assert "no nearer" in state_of(engine).words
            assert generated(engine.generate(asked(1)))[1].report.estimated_tokens == 0
    assert ShortFit.begun == 1
    assert fit_file(pair, tmp_path).stat().st_size == 0


def test_a_broken_file_is_fitted_again(tmp_path: Path) -> None:
    pair = drafted_by_first_layers("llama")
    fit_file(pair, tmp_path).write_bytes(b"broken")
    assert with_estimates(pair, None, tmp_path).estimates is None
    assert not fit_file(pair, tmp_path).exists()


def test_a_failure_costs_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self):
        yield Progress("draft", 0, STEPS)
        raise RuntimeError("a fit fails")

    monkeypatch.setattr(ShortFit, "steps", fail)
    with Engine(drafted_by_first_layers("llama"), config_of(tmp_path)) as engine:
        for seed in range(2):
            assert generated(engine.generate(asked(seed)))[1].report.mode == "sparse"
        assert eventually(lambda: not engine.health().background)
