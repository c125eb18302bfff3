"""Chunks against a fake clock: whole machines whose forwards take what was published for them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from mlx_specprefill import EngineConfig
from mlx_specprefill.engine.reading.chunks import ChunkSizer
from mlx_specprefill.engine.reading.costs import ForwardCost, LearntCost
from mlx_specprefill.engine.requests.job import Job
from mlx_specprefill.engine.requests.scheduler import Scheduler
from mlx_specprefill.events import Progress
from tests.support.tiny import tiny_pair

from .test_costs import MACHINES

DENSE = {"27B dense, M2 Max": MACHINES["27B dense, M2 Max"], "2B draft, M2 Ultra": ForwardCost(10, 0.33, 5e-6)}
GPU = EngineConfig(prefill_step=2048)


@dataclass
class Costs:
    """Learns about the target alone, from a prior that is five times too slow."""

    law: ForwardCost
    learnt: LearntCost = field(init=False)

    def __post_init__(self) -> None:
        self.learnt = LearntCost(ForwardCost(5 * self.law.fixed, 5 * self.law.token, 5 * self.law.pair))

    def cost(self, kind: str) -> ForwardCost:
        return self.learnt.cost

    def is_known(self, kind: str) -> bool:
        return self.learnt.count >= 12

    def observe(self, kind: str, tokens: int, depth: int, ms: float) -> None:
        self.learnt.observe(tokens, depth, ms)


class Machine:
    """Prefills of one machine, by its law instead of by MLX. Other work slows each forward by up to `noise`."""

    def __init__(self, law: ForwardCost, beside: bool = False, config: EngineConfig = GPU, noise: float = 0.0) -> None:
        self.noise, self.rng = noise, random.Random(0)
        self.law, self.scheduler, self.costs = law, Scheduler(), Costs(law)
        self.sizer = ChunkSizer(tiny_pair(), config, self.scheduler, self.costs)
        if beside:
            self.scheduler.add(0)
            self.scheduler.admit(0)
            self.scheduler.to_decode(0)
        self.uid = 0

    def prefill(self, tokens: int, background: bool = False, cached: int = 0) -> list[tuple[int, float]]:
        """Read a prompt behind a cached prefix.

        Returns the tokens and milliseconds of each chunk but the last, which has 32 tokens.
        """
        self.uid += 1
        job = Job(self.uid, iter(()), background=background)
        (self.scheduler.add_background if background else self.scheduler.add)(self.uid)
        if not background:
            self.scheduler.admit(self.uid)
        chunks, done = [], 0
        self.sizer.observe(job, Progress("prefill", 0, tokens, cached=cached))
        while done < tokens:
            self.sizer.begin(job)
            size = min(self.sizer.size("prefill"), tokens - 32 - done) if done < tokens - 32 else 32
            ms = self.law.ms(size, cached + done) * (1 + self.noise * self.rng.random())
            done += size
            job.step_s = ms / 1e3
            self.sizer.observe(job, Progress("prefill", done, tokens))
            chunks.append((size, ms))
        self.scheduler.remove(self.uid)
        return chunks[:-1]


def throughput(law: ForwardCost, beside: bool) -> float:
    """Tokens per millisecond of a prompt of 16K, once the costs are learnt, as a share of that in chunks of 2048."""
    machine = Machine(law, beside)
    for tokens in (300, 2000, 900, 5000):
        machine.prefill(tokens)
    took = sum(ms for _, ms in machine.prefill(16384 + 32))
    return sum(law.ms(2048, depth) for depth in range(0, 16384, 2048)) / took


@pytest.mark.parametrize("machine", MACHINES)
def test_alone_a_prefill_loses_less_than_a_tenth_of_its_speed_in_the_longest_chunks(machine):
    assert throughput(MACHINES[machine], beside=False) >= 0.9


@pytest.mark.parametrize("machine", MACHINES)
def test_beside_an_answer_a_prefill_keeps_two_thirds_of_its_speed(machine):
    assert throughput(MACHINES[machine], beside=True) >= 0.65


@pytest.mark.parametrize("machine", DENSE)
def test_beside_an_answer_chunks_of_dense_models_keep_the_latency_target(machine):
    """But for chunks of 64 tokens, which a large model can't read in that time."""
    law, run = DENSE[machine], Machine(DENSE[machine], beside=True)
    for tokens in (300, 2000, 900, 5000):
        run.prefill(tokens)
    for size, ms in run.prefill(16384):
        assert ms <= 1.05 * GPU.target_itl_ms or size <= 64
    assert law.ms(64) > GPU.target_itl_ms or max(size for size, _ in run.prefill(4000)) > 64


def test_a_fixed_part_above_the_target_is_not_paid_for_more_often_than_it_must():
    """M2 Ultra, 122B: no chunk ends within 200 ms, so chunks lose a third at most, and take no longer than that."""
    law, run = MACHINES["122B-A10B, M2 Ultra"], Machine(MACHINES["122B-A10B, M2 Ultra"], beside=True)
    for tokens in (300, 2000, 900, 5000):
        run.prefill(tokens)
    for size, ms in run.prefill(16384)[1:-1]:
        assert law.fixed / ms <= 0.4
        assert size <= 512


def test_a_step_that_was_never_tried_is_no_cap():
    """After chunks beside an answer a prefill that is alone takes the longest at once that it should."""
    run = Machine(MACHINES["30B-A3B, M1 Pro"], beside=True)
    run.prefill(8000)
    run.scheduler.remove(0)
    assert all(1200 <= size <= 1300 for size, _ in run.prefill(8192)[:-1])


@pytest.mark.parametrize("machine", MACHINES)
def test_alone_a_chunk_takes_two_seconds_or_loses_a_tenth(machine: str) -> None:
    """It is the largest that takes no longer, or, with a large fixed part, the smallest that loses no more."""
    law, run = MACHINES[machine], Machine(MACHINES[machine])
    for tokens in (300, 2000, 900, 5000):
        run.prefill(tokens)
    for depth in (0, 20_000):
        size, ms = run.prefill(16384, cached=depth)[0]
        assert ms <= 2040 or law.fixed / law.ms(size - 64, depth) > 0.098
        assert size == 2048 or law.ms(size + 64, depth) > 1900
        assert law.fixed / ms <= 0.105


def test_depth_bounds_chunks():
    """A GPU's watchdog ends commands that compute for seconds: queries times keys are bounded."""
    run = Machine(MACHINES["35B-A3B, M4 Max"])
    depth = 0
    for size, _ in run.prefill(200_000):
        assert size * depth <= 2048 * 32768
        depth += size
    assert min(size for size, _ in run.prefill(200_000)[:-1]) >= 256


@pytest.mark.parametrize("machine", MACHINES)
def test_a_thousand_idle_chunks_cost_little_and_move_no_prediction(machine: str) -> None:
    """Short ones lost up to two thirds of their time, and made 8K of the 122B cost half as much as it does."""
    law, run = MACHINES[machine], Machine(MACHINES[machine], noise=0.05)
    for tokens in (300, 2000, 900, 5000):
        run.prefill(tokens)
    chunks: list[tuple[int, float]] = []
    while len(chunks) < 1000:
        chunks += run.prefill(16384, background=True)
    assert run.costs.cost("target").prefill_ms(8192, 0, 2048) == pytest.approx(law.prefill_ms(8192, 0, 2048), rel=0.15)
    run.noise = 0.0
    took = sum(ms for _, ms in run.prefill(16384 + 32, background=True))
    assert took < 1.4 * sum(law.ms(2048, depth) for depth in range(0, 16384, 2048))


@pytest.mark.parametrize("machine", DENSE)
def test_background_chunks_leave_a_third_of_their_time_for_what_slows_them(machine):
    run = Machine(DENSE[machine])
    for tokens in (300, 2000, 900):
        run.prefill(tokens)
    for cached in (0, 8000, 40_000):
        sizes = [(size, ms) for size, ms in run.prefill(8000, background=True, cached=cached)]
        most = 1.15 if cached else 1.05  # so deep a chunk was never timed before
        aim = run.law.fixed + 2 / 3 * (GPU.target_itl_ms - run.law.fixed)
        assert max((ms for size, ms in sizes if size > 16), default=0) <= most * aim
        assert max(ms for _, ms in sizes) <= most * GPU.target_itl_ms
        assert min(size for size, _ in sizes[:-1]) >= 8


def test_the_longest_chunk_may_be_changed_while_it_runs():
    run = Machine(MACHINES["35B-A3B, M4 Max"])
    run.sizer.largest = 1024
    assert max(size for size, _ in run.prefill(8000)) == 1024


@pytest.mark.parametrize(
    ("stage", "done", "learns"),
    [("prefill", 100, True), ("draft", 100, True), ("draft", 5000, False), ("queued", 0, False)],
)
def test_what_came_from_a_cache_is_not_learnt_from(stage: Any, done: int, learns: bool):
    run = Machine(MACHINES["35B-A3B, M4 Max"])
    run.scheduler.add(1)
    run.scheduler.admit(1)
    job = Job(1, iter(()))
    run.sizer.begin(job)
    run.sizer.size(stage)
    job.step_s = 0.1
    run.sizer.observe(job, Progress(stage, done, 6000))
    assert (run.costs.learnt.count == 1) == learns
