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


SLICE = 200  # milliseconds


def tick(scheduler, tokens=100, ms=SLICE):
    """One slice; whose it was."""
    uid = scheduler.pick()
    scheduler.served(uid, tokens, ms)
    return uid


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("ran", [0, 1, 30, 300, 3000])
@pytest.mark.parametrize("count", [1, 2, 8, 31, 200])
def test_a_newcomer_starts_with_the_second_slice_at_the_latest(count, ran, short):
    """However many long prefills there are and however long they ran, at any moment of their turns."""
    scheduler = admitted(*range(count), max_rows=1000)
    for _ in range(ran):
        tick(scheduler)
    for newcomer in range(1000, 1010):
        scheduler.add(newcomer)
        if short:
            scheduler.expect(newcomer, 1)
        scheduler.admit(newcomer)
        assert newcomer in (tick(scheduler), tick(scheduler))
        scheduler.remove(newcomer)
        tick(scheduler)


def uneven(scheduler):
    """A tick in which the oldest's slice takes much less time than the others': it needs many for its fifth."""
    uid = scheduler.pick()
    scheduler.served(uid, 100, 10 if uid == 0 else SLICE)
    return uid


def test_a_short_newcomer_waits_for_no_two_slices_of_the_oldest_however_short_they_are():
    scheduler = admitted(*range(31), max_rows=1000)
    for newcomer in range(1000, 1300):
        scheduler.add(newcomer)
        scheduler.expect(newcomer, 1)
        scheduler.admit(newcomer)
        assert newcomer in (uneven(scheduler), uneven(scheduler))
        scheduler.remove(newcomer)
        for _ in range(newcomer % 7):
            uneven(scheduler)


def test_what_is_owed_to_the_oldest_does_not_grow_without_bound():
    """After an hour of short requests that left it less than its fifth, it takes no more than two seconds in a row."""
    scheduler = admitted(0, max_rows=100_000)
    for uid in range(1, 20_000):
        scheduler.add(uid)
        scheduler.expect(uid, 1)
        scheduler.admit(uid)
        while uneven(scheduler) == 0:
            pass
        scheduler.remove(uid)
    scheduler.add(20_000)
    scheduler.admit(20_000)
    waited = 0
    while scheduler.pick() == 0:
        uneven(scheduler)
        waited += 10
    assert waited <= 2 * scheduler.patience


def test_steps_that_take_no_time_are_no_slices():
    """A prompt is planned and looked up before its slice, and its last step ends it: the oldest gets none of these."""
    scheduler = admitted(*range(8), max_rows=100)
    for _ in range(100):
        tick(scheduler)
    for uid in range(100, 120):
        scheduler.add(uid)
        scheduler.expect(uid, 1, 11)
        scheduler.admit(uid)
        steps = iter([(0, 0), (0, 3), (11, 20), (0, 0)])
        order = []
        while (step := next(steps, None)) is not None:
            while (picked := scheduler.pick()) != uid:
                order.append(picked)
                scheduler.served(picked, 100, SLICE)
            scheduler.served(uid, *step)
        scheduler.to_decode(uid)
        assert len(order) <= 1


@pytest.mark.parametrize("count", [1, 4, 5, 6, 31])
@pytest.mark.parametrize("every", [0.5, 1.0, 1.3, 3.0])
def test_the_oldest_long_prefill_gets_a_fifth_of_the_time(count, every):
    """Whatever comes: here a short request for each so many slices, which is more than there is time for."""
    rng = random.Random(f"{count} {every}")
    scheduler = admitted(*range(count), max_rows=100_000)
    times, due, uid = {True: 0, False: 0}, 0.0, count
    while sum(times.values()) < 400_000:
        ms = rng.randint(SLICE // 2, SLICE)
        picked = tick(scheduler, ms=ms)
        times[picked == 0] += ms
        if picked >= count:
            scheduler.to_decode(picked)
            scheduler.remove(picked)
        while due * SLICE <= sum(times.values()):
            uid, due = uid + 1, due + every
            scheduler.add(uid)
            scheduler.expect(uid, 1)
            scheduler.admit(uid)
    assert times[True] >= sum(times.values()) / 5 - 1000


@pytest.mark.parametrize("uid", range(6))
def test_a_prompt_that_was_read_waits_for_nobody(uid):
    """Its last step takes no time, and what is served least, or owed to the oldest, does not come before it."""
    scheduler = admitted(*range(6))
    for _ in range(10):
        while scheduler.pick() != uid:
            tick(scheduler)
        scheduler.served(uid, 100, SLICE, read=True)
        assert scheduler.pick() == uid
        scheduler.served(uid, 0, 0)


def test_short_requests_are_served_in_order_of_arrival():
    scheduler = admitted(0)
    for uid in (1, 2, 3):
        scheduler.add(uid)
        scheduler.expect(uid, 1)
        scheduler.admit(uid)
    order = []
    while len(scheduler.decoding) < 3:
        order.append(tick(scheduler))
        if order[-1]:
            scheduler.to_decode(order[-1])
    assert order == [1, 2, 3]


def test_what_is_not_short_after_all_does_not_go_first_for_long():
    scheduler = admitted(0)
    run_slices(scheduler, 2)
    scheduler.add(1)
    scheduler.expect(1, 1)
    scheduler.admit(1)
    assert [tick(scheduler) for _ in range(10)].count(0) >= 4


def test_a_part_of_the_rows_is_kept_for_short_requests():
    scheduler, shorts = Scheduler(max_rows=8), []
    for uid in range(10):
        scheduler.add(uid)
    while (uid := scheduler.next_waiting()) is not None:
        scheduler.admit(uid)
    assert scheduler.running == 5
    for uid in range(100, 105):
        scheduler.add(uid)
        scheduler.expect(uid, 1)
    while (uid := scheduler.next_waiting()) is not None:
        scheduler.admit(uid)
        shorts.append(uid)
    assert shorts == [100, 101, 102]
    scheduler.to_decode(100)
    assert scheduler.next_waiting() is None
    scheduler.remove(0)
    assert scheduler.next_waiting() == 5  # a row that is not kept: in order of arrival
    scheduler.admit(5)
    scheduler.remove(100)
    assert scheduler.next_waiting() == 103


def test_brief_requests_have_rows_of_their_own_beside_short_ones():
    scheduler = Scheduler(max_rows=16)
    for uid in range(20):
        scheduler.add(uid)
    for uid, slices in ((100, 4), (101, 40), (102, 2), (103, 2), (104, 1), (105, 1), (106, 1)):
        scheduler.add(uid)
        scheduler.expect(uid, slices, 600)
    while (uid := scheduler.next_waiting()) is not None:
        scheduler.admit(uid)
    assert [uid for uid in range(120) if uid in scheduler and uid not in scheduler._waiting] == [
        *range(10),
        *(100, 101),  # rows for brief ones
        *(104, 105, 106),  # rows for short ones
    ]
    scheduler.remove(101)
    assert scheduler.next_waiting() == 102  # the first of those that may have it


@pytest.mark.parametrize("slices", [2, 4, 10, 100])
def test_what_is_brief_is_told_by_tokens_whatever_the_speed_of_the_machine(slices):
    """Beside prompts of 2000 tokens one of 600 gets a kept row, and one of 1200 doesn't take it."""
    scheduler = Scheduler(max_rows=16)
    for uid in range(30):
        scheduler.add(uid)
        scheduler.expect(uid, 4 * slices, 2000)
    for uid, tokens in ((100, 1200), (101, 600)):
        scheduler.add(uid)
        scheduler.expect(uid, slices, tokens)
    while (uid := scheduler.next_waiting()) not in (None, 100, 101):
        scheduler.admit(uid)
    assert uid == 101
    scheduler.admit(101)
    assert scheduler.pick() == 101


def test_of_short_and_brief_requests_the_one_with_the_fewest_tokens_left_goes_first():
    scheduler = admitted(*range(8))
    for uid, slices, tokens in ((10, 2, 600), (11, 1, 300), (12, 1, 11)):
        scheduler.add(uid)
        scheduler.expect(uid, slices, tokens)
        scheduler.admit(uid)
    order = []
    for uid, slices in ((12, 1), (11, 3), (10, 6)):
        for _ in range(slices):
            order.append(tick(scheduler, ms=40))
        scheduler.to_decode(uid)
    assert order == [12, 11, 11, 11, *[10] * 6]


def test_short_requests_take_any_row_in_order_of_arrival():
    scheduler = Scheduler(max_rows=8)
    for uid in range(20):
        scheduler.add(uid)
        scheduler.expect(uid, 1)
    while (uid := scheduler.next_waiting()) is not None:
        scheduler.admit(uid)
    assert scheduler.running == 8
    scheduler.remove(3)
    assert scheduler.next_waiting() == 8


def test_a_short_request_passes_one_for_which_there_is_no_memory_but_not_forever():
    scheduler = Scheduler(max_rows=8)
    scheduler.add(0)
    assert scheduler.next_waiting(passing=True) is None
    scheduler.add(1)
    assert scheduler.next_waiting(passing=True) is None
    for uid in range(100, 300):
        scheduler.add(uid)
        scheduler.expect(uid, 1)
    at_once = 0
    while (uid := scheduler.next_waiting(passing=True)) is not None:
        scheduler.admit(uid, passing=True)
        at_once += 1
    assert at_once == 3  # kept rows
    passed = at_once
    while scheduler.next_waiting(passing=True) is not None or scheduler.running:
        for uid in [uid for uid in range(100, 300) if uid in scheduler._prefilling]:
            scheduler.remove(uid)
        while (uid := scheduler.next_waiting(passing=True)) is not None:
            scheduler.admit(uid, passing=True)
            passed += 1
    assert passed == 64
    assert scheduler.next_waiting() == 0


def test_long_prefills_progress_evenly():
    order = run_slices(admitted(1, 2, 3), 300)
    assert [order.count(uid) for uid in (1, 2, 3)] == [100, 100, 100]


@pytest.mark.parametrize("own", [100, 50, 25])
@pytest.mark.parametrize(("every", "least"), [(200, 0.45), (125, 0.19), (100, 0.19), (20, 0.19)])
def test_a_stream_of_short_requests_starves_nobody(every, least, own):
    """Newcomers of one slice of 100 ms each: the long one gets what they leave, however short its own slices are."""
    scheduler, mine, now, newcomers = admitted(0, patience=400, max_rows=10_000), 0, 0, 0
    while now < 50_000:
        while newcomers * every <= now:
            newcomers += 1
            scheduler.add(newcomers)
            scheduler.expect(newcomers, 1)
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
    """1000 random arrival and cancel schedules per seed: every request ends, within a bound, and no row stays."""
    for case in range(1000):
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
                    if (left[uid][0] == 1) != (rng.random() < 0.1):  # the expectation may be wrong
                        scheduler.expect(uid, 1)
            for uid, when in cancels.items():
                if tick >= when and uid in scheduler and uid not in ended:
                    scheduler.remove(uid)
                    ended.add(uid)
            passing = rng.random() < 0.2
            while (uid := scheduler.next_waiting(passing)) is not None:
                scheduler.admit(uid, passing)
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


def test_slices_in_a_crowd_are_a_few_times_as_long_as_those_of_the_shortest_prompts():
    sizer = SliceSizer(2048, smallest=64, target_ms=200)
    for _ in range(10):
        sizer.observe("prefill", 256, 64.0)  # a quarter of a millisecond per token: 800 fit into the target
    assert sizer.size("prefill", contended=True, crowded=True) == 512
    for ms in (20.0, 20.0, 20.0, 90.0, 90.0, 90.0):  # the last slices of long prompts are among them
        sizer.observe_short(ms)
    assert sizer.size("prefill", contended=True, crowded=True) == 256
    assert sizer.size("prefill", contended=True) == 512
    for _ in range(50):
        sizer.observe_short(100.0)  # a large model: the target stays
    assert sizer.size("prefill", contended=True, crowded=True) == 512


def test_how_short_a_prompt_is_does_not_depend_on_the_size_of_slices():
    sizer = SliceSizer(2048, smallest=64, target_ms=200)
    assert [sizer.full_slices("prefill", tokens) for tokens in (11, 256, 600)] == [1, 1, 3]
    for _ in range(20):
        sizer.observe("prefill", 64, 20.0)
        sizer.observe_short(10.0)
    assert sizer.size("prefill", contended=True, crowded=True) == 128
    assert [sizer.full_slices("prefill", tokens) for tokens in (11, 600, 1000, 2000)] == [1, 1, 2, 4]
    for _ in range(50):
        sizer.observe("prefill", 64, 6400.0)
    assert [sizer.full_slices("prefill", tokens) for tokens in (11, 64, 65)] == [1, 1, 2]  # no slice is smaller


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
