"""The scheduler on plain integers: short prompts first, no starvation, no leaked place."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mlx_specprefill.engine.requests.scheduler import Scheduler

CHUNK, MS = 100, 200  # tokens and milliseconds of one


class Run:
    """A scheduler and how much each of its prefills has left."""

    def __init__(self, *lengths: int, **options: int) -> None:
        self.scheduler, self.left = Scheduler(**options), dict[Any, Any]()
        self.spent: dict[int, int] = {}
        for length in lengths:
            self.admit(length)

    def admit(self, left: int) -> int:
        uid = len(self.left)
        self.left[uid] = left
        self.scheduler.add(uid, left)
        self.scheduler.admit(uid)
        return uid

    def chunk(self, ms: int | None = None) -> int:
        """Run one chunk; whose it was. A prefill with nothing left goes."""
        uid = self.scheduler.pick()
        assert uid is not None
        took = MS * min(CHUNK, self.left[uid]) // CHUNK if ms is None else ms
        self.left[uid] = max(0, self.left[uid] - CHUNK)
        self.spent[uid] = self.spent.get(uid, 0) + took
        self.scheduler.record(uid, self.left[uid], took)
        if not self.left[uid]:
            self.scheduler.remove(uid)
        return uid


def test_the_prompt_with_the_fewest_tokens_left_goes_first():
    run = Run(5000, 300, 3000, patience=10**6)
    assert [run.chunk() for _ in range(5)] == [1, 1, 1, 2, 2]
    late = run.admit(100)
    assert run.chunk() == late


@pytest.mark.parametrize("ran", [0, 1, 30, 300])
@pytest.mark.parametrize("count", [1, 2, 8, 31, 200])
def test_a_short_prompt_starts_with_the_second_chunk_at_the_latest(count, ran):
    """However many long prefills there are and however long they ran, at any moment."""
    run = Run(*[10**6] * count, max_rows=1000)
    for _ in range(ran):
        run.chunk()
    for _ in range(10):
        newcomer = run.admit(50)
        assert newcomer in (run.chunk(), run.chunk())
        run.chunk()


@pytest.mark.extended
@pytest.mark.parametrize("own", [MS, MS // 2, MS // 4])
@pytest.mark.parametrize("count", [1, 4, 31])
def test_the_oldest_long_prefill_gets_a_fifth_of_the_time(count, own):
    """Whatever comes: here more short prompts than there is time for."""
    run, now = Run(*[10**9] * count, max_rows=10**6), 0
    while now < 400_000:
        if len(run.left) - count <= now // (MS // 2):
            run.admit(CHUNK)
        now += own if run.chunk(own if run.scheduler.pick() == 0 else MS) == 0 else MS
    assert run.spent[0] >= now / 5 - 1000


def test_a_prompt_that_was_read_waits_for_nobody():
    """Its last step takes no time, and what is due to the oldest does not come before it."""
    scheduler = Scheduler(patience=200)
    for uid in range(3):
        scheduler.add(uid, 1000)
        scheduler.admit(uid)
    scheduler.record(1, 0, 500)
    assert scheduler.pick() == 1


def test_a_stage_without_tokens_keeps_what_was_left():
    scheduler = Scheduler()
    for uid, left in ((0, 1000), (1, 500)):
        scheduler.add(uid, left)
        scheduler.admit(uid)
    scheduler.record(1, None, 0)
    assert scheduler.pick() == 1


# --- admission -------------------------------------------------------------------------------------------------------


def admitted(scheduler: Scheduler) -> list[int]:
    """Admit whatever there is a place for; in which order."""
    found = []
    while (uid := scheduler.next_waiting()) is not None:
        scheduler.admit(uid)
        found.append(uid)
    return found


def test_short_requests_are_admitted_first_but_every_fourth_place_goes_to_the_first_in_line():
    scheduler = Scheduler(max_rows=1000)
    scheduler.add(0, 9000)
    scheduler.add(1, 8000)
    for uid in range(2, 12):
        scheduler.add(uid, 100)
    assert admitted(scheduler) == [2, 3, 4, 0, 5, 6, 7, 1, 8, 9, 10, 11]


def test_equal_requests_are_admitted_in_order_of_arrival():
    scheduler = Scheduler(max_rows=64)
    for uid in range(40):
        scheduler.add(uid, 700)
    assert admitted(scheduler) == list(range(40))


@pytest.mark.parametrize("end", ["to_decode", "remove"])
def test_a_held_request_waits_for_one_prefill_and_for_no_longer(end):
    scheduler = Scheduler()
    for uid in range(3):
        scheduler.add(uid, 100)
    scheduler.admit(0)
    scheduler.hold(1, 0)
    assert admitted(scheduler) == [2]
    assert scheduler.waiting == 1
    getattr(scheduler, end)(0)
    assert admitted(scheduler) == [1]


def test_a_held_request_is_not_passed_by_others():
    scheduler = Scheduler()
    for uid in range(2):
        scheduler.add(uid, 10**5)
    scheduler.admit(0)
    scheduler.hold(1, 0)
    for uid in range(10, 100):
        scheduler.add(uid, 100)
        assert admitted(scheduler) == [uid]
        scheduler.remove(uid)
    scheduler.add(100, 9000)
    scheduler.add(101, 50)
    assert scheduler.next_waiting() == 101


def test_a_quarter_of_the_places_is_kept_for_short_prompts():
    scheduler = Scheduler(max_rows=8)
    for uid in range(10):
        scheduler.add(uid, 4000)
    assert admitted(scheduler) == [0, 1, 2, 3, 4, 5]
    for uid in range(100, 105):
        scheduler.add(uid, 20)
    assert admitted(scheduler) == [100, 101]
    scheduler.to_decode(100)
    assert scheduler.next_waiting() is None
    scheduler.remove(0)  # a place for anybody
    assert admitted(scheduler) == [102]
    scheduler.remove(100)
    scheduler.remove(101)
    assert len(admitted(scheduler)) == 2


@pytest.mark.parametrize(("left", "is_short"), [(200, True), (256, True), (900, True), (1000, True), (1200, False)])
def test_short_is_one_chunk_or_half_of_the_median_request(left, is_short):
    scheduler = Scheduler(max_rows=8)
    for uid in range(20):
        scheduler.add(uid, 2000)
    admitted(scheduler)
    scheduler.add(100, left)
    assert (scheduler.next_waiting() == 100) == is_short


def test_a_short_request_passes_one_for_which_there_is_no_memory_but_not_for_ever():
    scheduler, passed = Scheduler(max_rows=1000), 0
    scheduler.add(0, 10**6)
    assert scheduler.next_waiting(passing=True) is None
    for uid in range(1, 300):
        scheduler.add(uid, 10)
    while (uid := scheduler.next_waiting()) is not None:
        if uid == 0 and (uid := scheduler.next_waiting(passing=True)) is None:
            break
        scheduler.admit(uid)
        passed += 1
    assert passed == 64
    assert scheduler.next_waiting() == 0


def test_background_runs_only_when_nothing_else_wants_the_device():
    scheduler = Scheduler()
    scheduler.add_background(9)
    assert scheduler.pick() == 9
    assert not scheduler.is_contended
    scheduler.add(1)
    assert scheduler.pick() is None
    scheduler.admit(1)
    assert scheduler.pick() == 1
    scheduler.to_decode(1)
    assert scheduler.pick() is None
    scheduler.remove(1)
    assert scheduler.pick() == 9


def test_a_chunk_is_contended_when_somebody_waits_for_its_end():
    scheduler = Scheduler()
    scheduler.add(1)
    scheduler.admit(1)
    assert not scheduler.is_contended
    scheduler.add(2)
    assert scheduler.is_contended
    scheduler.remove(2)
    scheduler.to_decode(1)
    assert scheduler.is_contended


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(2, 10))])
def test_random_schedules_finish_everything_and_leak_nothing(seed):
    """1000 random arrival and cancel schedules per seed: every request ends, within a bound, and no place stays."""
    for case in range(1000):
        rng = random.Random(f"{seed}/{case}")
        scheduler = Scheduler(max_rows=rng.randint(1, 6), patience=rng.randint(1, 5))
        arrivals = {
            uid: (rng.randrange(60), rng.randint(1, 20), rng.randint(1, 15)) for uid in range(rng.randint(1, 25))
        }
        cancels = {uid: rng.randrange(100) for uid in arrivals if rng.random() < 0.3}
        left = {uid: [prefill, decode] for uid, (_, prefill, decode) in arrivals.items()}
        ended, step = set[Any](), 0
        work = sum(prefill + decode for _, prefill, decode in arrivals.values())
        while len(ended) < len(arrivals):
            assert step < 200 + 4 * work, "starvation"
            for uid, (when, _, _) in arrivals.items():
                if when == step:
                    scheduler.add(uid)
                    if rng.random() < 0.9:  # the expectation may be wrong, or missing
                        scheduler.add(uid, rng.choice([left[uid][0], 1, 500]))
            for uid, when in cancels.items():
                if step >= when and arrivals[uid][0] <= step and uid not in ended:
                    scheduler.remove(uid)
                    ended.add(uid)
            while (uid := scheduler.next_waiting() if rng.random() < 0.8 else scheduler.next_waiting(True)) is not None:
                scheduler.admit(uid)
            assert scheduler.running <= scheduler.max_rows
            for uid in scheduler.decoding:
                left[uid][1] -= 1
                if left[uid][1] == 0:
                    scheduler.remove(uid)
                    ended.add(uid)
            if (uid := scheduler.pick()) is not None:
                left[uid][0] -= 1
                scheduler.record(uid, left[uid][0], 1)
                if left[uid][0] == 0:
                    scheduler.to_decode(uid)
            step += 1
        assert scheduler.idle
        assert scheduler.running == 0
