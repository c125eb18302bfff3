"""The scheduler on plain integers: fairness, no starvation, no leaked row."""

from __future__ import annotations

import random

import pytest

from mlx_specprefill.engine.scheduler import Scheduler, SliceSizer


def admitted(*uids, **options):
    scheduler = Scheduler(**options)
    for uid in uids:
        scheduler.add(uid)
        scheduler.admit(uid)
    return scheduler


def run_slices(scheduler, count, tokens=100):
    order = []
    for _ in range(count):
        uid = scheduler.pick()
        order.append(uid)
        if uid is not None:
            scheduler.served(uid, tokens, tokens)
    return order


def test_a_short_request_overtakes_a_long_prefill():
    scheduler = admitted(1)
    run_slices(scheduler, 50)
    scheduler.add(2)
    scheduler.admit(2)
    assert scheduler.pick() == 2


def test_long_prefills_progress_evenly():
    order = run_slices(admitted(1, 2, 3), 300)
    assert [order.count(uid) for uid in (1, 2, 3)] == [100, 100, 100]


@pytest.mark.parametrize("own", [100, 50, 25])
@pytest.mark.parametrize(("every", "least"), [(200, 0.45), (125, 0.19), (100, 0.04)])
def test_a_stream_of_short_requests_starves_nobody(every, least, own):
    """Newcomers of one slice of 100 ms each: the long one gets what they leave, however short its own slices are; at
    overload, when they starve each other as well, still a share."""
    scheduler, mine, now, newcomers = admitted(0, patience=400), 0, 0, 0
    while now < 50_000:
        while newcomers * every <= now:
            newcomers += 1
            scheduler.add(newcomers)
            scheduler.admit(newcomers)
        picked = scheduler.pick()
        ms = own if picked == 0 else 100
        scheduler.served(picked, ms, ms)
        now += ms
        if picked == 0:
            mine += ms
        else:
            scheduler.remove(picked)
    assert mine >= least * now


def test_nobody_waits_longer_than_patience_allows():
    scheduler = admitted(*range(5), patience=28)
    last_seen = dict.fromkeys(range(5), 0)
    for tick, uid in enumerate(run_slices(scheduler, 500, tokens=7), start=1):
        last_seen[uid] = tick
        assert all(tick - seen <= 4 + 5 for seen in last_seen.values())


def test_rows_are_limited_and_handed_on():
    scheduler = Scheduler(max_rows=2)
    for uid in range(3):
        scheduler.add(uid)
    scheduler.admit(scheduler.next_waiting())
    scheduler.admit(scheduler.next_waiting())
    assert scheduler.next_waiting() is None
    scheduler.to_decode(0)
    assert scheduler.next_waiting() is None
    scheduler.remove(0)
    assert scheduler.next_waiting() == 2


def test_background_runs_only_when_nothing_else_wants_the_device():
    scheduler = Scheduler()
    scheduler.add_background(9)
    assert scheduler.pick() == 9
    scheduler.add(1)
    assert scheduler.pick() is None
    scheduler.admit(1)
    assert scheduler.pick() == 1
    scheduler.to_decode(1)
    assert scheduler.pick() is None
    scheduler.remove(1)
    assert scheduler.pick() == 9


def test_a_uid_is_unique():
    scheduler = admitted(1)
    with pytest.raises(ValueError, match="already"):
        scheduler.add(1)
    with pytest.raises(ValueError, match="already"):
        scheduler.add_background(1)


@pytest.mark.parametrize("seed", range(10))
def test_random_schedules_finish_everything_and_leak_nothing(seed):
    """100 random arrival and cancel schedules per seed: every request ends, within a bound, and no row stays."""
    for case in range(100):
        rng = random.Random(f"{seed}/{case}")
        scheduler = Scheduler(max_rows=rng.randint(1, 6), patience=rng.randint(1, 5))
        arrivals = {
            uid: (rng.randrange(60), rng.randint(1, 20), rng.randint(1, 15)) for uid in range(rng.randint(1, 25))
        }
        cancels = {uid: rng.randrange(100) for uid in arrivals if rng.random() < 0.3}
        left = {uid: [prefill, decode] for uid, (_, prefill, decode) in arrivals.items()}
        ended, tick = set(), 0
        work = sum(prefill + decode for _, prefill, decode in arrivals.values())
        while len(ended) < len(arrivals):
            assert tick < 200 + 4 * work, "starvation"
            for uid, (when, _, _) in arrivals.items():
                if when == tick:
                    scheduler.add(uid)
            for uid, when in cancels.items():
                if tick >= when and uid in scheduler and uid not in ended:
                    scheduler.remove(uid)
                    ended.add(uid)
            while (uid := scheduler.next_waiting()) is not None:
                scheduler.admit(uid)
            assert scheduler.running <= scheduler.max_rows
            for uid in scheduler.decoding:
                left[uid][1] -= 1
                if left[uid][1] == 0:
                    scheduler.remove(uid)
                    ended.add(uid)
            if (uid := scheduler.pick()) is not None:
                left[uid][0] -= 1
                scheduler.served(uid, 1, 1)
                if left[uid][0] == 0:
                    scheduler.to_decode(uid)
            tick += 1
        assert scheduler.idle
        assert scheduler.running == 0


def test_slices_shrink_to_the_target_while_answers_run():
    sizer = SliceSizer(2048, smallest=64, target_ms=100)
    assert sizer.size("target", contended=True) == 256
    for _ in range(20):
        sizer.observe("target", 256, 256 * 0.5)  # half a millisecond per token: 200 tokens fit
    assert sizer.size("target", contended=True) == 128
    assert sizer.size("draft", contended=True) == 256
    for _ in range(50):
        sizer.observe("target", 64, 64 * 50.0)
    assert sizer.size("target", contended=True) == 64


@pytest.mark.parametrize("depth", [0, 500, 6000])
def test_slices_fit_the_target_at_any_depth(depth):
    """Attention makes later slices slower; the line is found from slices at other depths."""

    def ms(tokens: int, offset: int) -> float:
        return tokens * (0.25 + 4e-4 * (offset + tokens / 2))

    sizer, offset = SliceSizer(2048, smallest=64, target_ms=200), 0
    for tokens in (256, 512, 512, 256, 256):
        sizer.observe("prefill", tokens, ms(tokens, offset), offset)
        offset += tokens
    size = sizer.size("prefill", contended=True, offset=depth)
    assert ms(size, depth) <= 200
    assert size == 256 or ms(2 * size, depth) > 200


def test_slices_grow_no_faster_than_twofold():
    """A short prompt's speed says little about a long slice."""
    sizer, sizes = SliceSizer(2048, smallest=64, target_ms=100), []
    for _ in range(5):
        sizes.append(sizer.size("draft", contended=False))
        sizer.observe("draft", sizes[-1], 0.001)
    assert sizes == [256, 512, 1024, 2048, 2048]


def test_a_newcomer_does_not_wait_for_a_slice_of_full_size():
    """With nothing decoding a slice may take longer, but not as long as it likes."""
    sizer = SliceSizer(2048, smallest=64, target_ms=200)
    sizer.observe("target", 2048, 2048 * 0.5)
    assert sizer.size("target", contended=False) == 512
    assert sizer.size("target", contended=False, background=True) == 64
    for _ in range(50):
        sizer.observe("target", 64, 64 * 50.0)
    assert sizer.size("target", contended=False) == 128
    assert SliceSizer(128, smallest=64).size("target", contended=False) == 128


def test_a_newcomer_catches_up_before_the_long_one_goes_on():
    scheduler = Scheduler()
    for uid in (1, 2):
        scheduler.add(uid)
        scheduler.admit(uid)
        if uid == 1:
            scheduler.served(1, 1024, 0)
    order = []
    for _ in range(5):
        order.append(scheduler.pick())
        scheduler.served(order[-1], 256, 0)
    assert order == [2, 2, 2, 2, 2]
    assert scheduler.pick() == 1


@pytest.mark.parametrize("bad", [{"largest": 0}, {"largest": 10, "smallest": 20}, {"largest": 10, "target_ms": 0}])
def test_bad_slice_limits_are_refused(bad):
    with pytest.raises(ValueError, match="need"):
        SliceSizer(**{"smallest": 1, **bad})


@pytest.mark.parametrize("bad", [{"max_rows": 0}, {"patience": 0}])
def test_bad_scheduler_limits_are_refused(bad):
    with pytest.raises(ValueError, match="positive"):
        Scheduler(**bad)
