"""The promise, held against streams of answers whose chances of differing are known."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from mlx_specprefill_server.promise import SHARES, Promises, holds, is_hopeless

MAX_DIFFER = 0.05
STREAMS = 10_000
Floats = npt.NDArray[np.float64]
Chances = Callable[[int, npt.NDArray[np.bool_]], Floats]
"""Chances of differing (STREAMS, shares) at a step, given which streams send before comparing."""


class Simulation:
    """All streams at once. `broken` marks those that sent while the mean chance so far was above the limit."""

    def __init__(self, chances: Chances, steps: int, streams: int = STREAMS) -> None:
        rng, rows = np.random.default_rng(1), np.arange(streams)
        size = len(SHARES) + 1
        same, differs, chance = (np.zeros((streams, size)) for _ in range(3))
        self.level = np.zeros(streams, dtype=int)
        self.broken = np.zeros(streams, dtype=bool)
        self.sent, self.sent_differing = np.zeros(streams), np.zeros(streams)
        for step in range(steps):
            sends = self._sends(same, differs, rows)
            count = np.maximum(1, same[rows, self.level] + differs[rows, self.level])
            self.broken |= sends & (chance[rows, self.level] / count > MAX_DIFFER)
            now = np.column_stack([chances(step, sends), np.zeros(streams)])[rows, self.level]
            is_different = rng.random(streams) < now
            self.sent += sends
            self.sent_differing += sends & is_different
            chance[rows, self.level] += now
            same[rows, self.level] += ~is_different
            differs[rows, self.level] += is_different
            lost = is_hopeless(same[rows, self.level], differs[rows, self.level], MAX_DIFFER)
            self.level += lost & (self.level < len(SHARES))
        self.sends = self._sends(same, differs, rows)

    def _sends(self, same: Floats, differs: Floats, rows: npt.NDArray[np.int_]) -> npt.NDArray[np.bool_]:
        held = holds(same[rows, self.level], differs[rows, self.level], MAX_DIFFER)
        return np.asarray(held & (self.level < len(SHARES)))

    @property
    def shares(self) -> Floats:
        return np.array([*map(float, SHARES), 1.0])[self.level]


def steady(*chances: float) -> Chances:
    return lambda step, sends: np.tile(chances, (len(sends), 1))


def drifting(step: int, sends: npt.NDArray[np.bool_]) -> Floats:
    """Everything becomes worse, from 0 to a third."""
    return np.full((len(sends), len(SHARES)), min(1.0, step / 400) / 3)


def adverse(step: int, sends: npt.NDArray[np.bool_]) -> Floats:
    """Answers differ whenever they are sent before they are compared, and never else."""
    return np.tile(sends[:, None].astype(float), len(SHARES))


def turning(step: int, sends: npt.NDArray[np.bool_]) -> Floats:
    """Good and bad weeks take turns."""
    return np.full((len(sends), len(SHARES)), 0.002 if step % 200 < 120 else 0.2)


@pytest.mark.extended
@pytest.mark.parametrize(
    "chances",
    [
        *(steady(p, p, p, p) for p in (0.051, 0.055, 0.07, 0.1)),
        steady(0.2, 0.1, 0.06, 0.051),
        steady(0.051, 0.03, 0.01, 0.0),
        drifting,
        adverse,
        turning,
    ],
)
@pytest.mark.nightly
def test_the_promise_is_broken_in_at_most_one_stream_of_twenty(chances: Chances) -> None:
    found = Simulation(chances, 600)
    assert found.broken.mean() <= 0.05


@pytest.mark.extended
@pytest.mark.parametrize(
    ("chances", "best"),
    [
        (steady(0.0, 0.0, 0.0, 0.0), 0.1),
        (steady(0.002, 0.001, 0.0, 0.0), 0.1),
        (steady(0.2, 0.002, 0.001, 0.0), 0.2),
        (steady(0.3, 0.2, 0.002, 0.0), 0.3),
        (steady(0.5, 0.3, 0.2, 0.001), 0.5),
        (steady(0.5, 0.5, 0.5, 0.3), 1.0),
    ],
)
def test_after_two_hundred_verdicts_the_share_is_near_the_best(chances: Chances, best: float) -> None:
    """In nine streams of ten: the share is within .1 of the best fixed one, and used without waiting."""
    found = Simulation(chances, 200)
    near = np.abs(found.shares - best) <= 0.1 + 1e-9
    assert (near & (found.sends | (found.shares == 1))).mean() >= 0.9


def test_the_simulation_follows_the_server_s_own_rule() -> None:
    """One stream through `Promises`, step by step."""
    rng, promises, counts = np.random.default_rng(3), Promises(None, MAX_DIFFER), np.zeros((5, 2), dtype=int)
    level = 0
    for _ in range(300):
        promise = promises.of("key")
        assert promise.share == [*SHARES, Fraction(1)][level]
        if promise.share == 1:
            return
        is_same = rng.random() > 0.08
        promises.learn("key", promise.share, bool(is_same))
        counts[level][0 if is_same else 1] += 1
        level += bool(is_hopeless(*counts[level], MAX_DIFFER))
    pytest.fail("a share at which 8 % differ must be given up")


def test_counts_survive_a_restart_and_hold_no_text(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "promises.json"
    Promises(file, MAX_DIFFER).learn("demo::chat", SHARES[0], True)
    again = Promises(file, MAX_DIFFER).of("demo::chat")
    assert (again.same, again.differs) == (1, 0)
    assert file.read_text() == '{"demo::chat": [[1, 0], [0, 0], [0, 0], [0, 0]]}'
    for wrong in ("", "[]", '{"demo::chat": [[1]]}', '{"demo::chat": [["a", 0], [0, 0], [0, 0], [0, 0]]}'):
        file.write_text(wrong)
        assert Promises(file, MAX_DIFFER).of("demo::chat").same == 0


def test_the_bound_is_what_the_counts_say() -> None:
    promises = Promises(None, MAX_DIFFER)
    assert promises.of("key").to_dict()["bound"] == 1.0
    for _ in range(120):
        promises.learn("key", SHARES[0], True)
    promise = promises.of("key")
    assert promise.is_held
    assert 0.03 < promise.to_dict()["bound"] <= MAX_DIFFER
