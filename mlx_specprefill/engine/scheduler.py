"""Who gets the next slice of the device. Integers only: no arrays, no clocks, no threads.

One tick of the engine is one decode step of everything that decodes, then at most one slice of one prefill. So a
running answer waits for one slice at most, whatever arrives. Among prefills those of one slice go first, in order of
arrival, then the one served least: so a short prompt overtakes long ones at once, a long newcomer catches up, and then
all advance evenly. The oldest gets a fifth of the time whatever comes, and every prefill is the oldest some day, so
nobody waits forever; it takes no two slices in a row from a prompt of one slice, so that one starts with the second
slice at the latest, however many others there are and however long they ran. An eighth of the rows is kept for prompts
of one slice, and another for these and prompts of a few. Background jobs (densification) run only when nothing else
wants the device.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

__all__ = ["Scheduler", "SliceSizer"]

_START = 4  # times `smallest`: tokens of the first slice, whose speed is not known yet
# With nothing decoding only a newcomer waits for a slice: it may take this times `target_ms`, and is not cut below this
# times `smallest`, because short slices cost large models more per token.
_ALONE, _ALONE_FLOOR = 1.5, 2
_REMEMBERED = 12  # slices
_OTHERS = 4  # milliseconds that others may have for each of the oldest prefill's own
_SHORT_SLICES = 3  # after which a prefill is not taken for a short one any more: draft, target, and one more
_FEW_SLICES = 4
_KEPT_ROWS = 8  # one of so many is kept for prompts of one slice, and one for prompts of a few
_FEWEST_ROWS = 4  # of which one is kept
_PASSES = 64  # times that a request for which there is no memory lets a short one pass
_BACKGROUND = 0.25  # times `target_ms`: whoever comes while nobody was there should hardly notice


@dataclass
class _Job:
    uid: int
    short: bool = False  # expected to be done with one slice
    background: bool = False
    served: int = 0  # tokens of prefill done
    slices: int = 0  # that got something done

    @property
    def hurried(self) -> bool:
        return self.short and self.slices < _SHORT_SLICES


@dataclass
class _Waiting:
    slices: int | None = None  # expected; None: many
    passed: int = 0  # by others, for want of memory

    @property
    def short(self) -> bool:
        return self.slices == 1

    @property
    def medium(self) -> bool:
        return self.slices is not None and 1 < self.slices <= _FEW_SLICES


class Scheduler:
    """Waiting, prefilling and decoding requests by uid.

    A request is short if one slice is left of its prompt, and medium if a few are.

    Args:
        max_rows: requests that may hold a cache at once (prefilling or decoding); the rest wait in order of arrival.
            An eighth of them is for short ones, and another for short and medium ones.
        patience: milliseconds that may go to others before the oldest prefill must get a slice.
    """

    def __init__(self, max_rows: int = 32, patience: int = 800) -> None:
        if max_rows < 1 or patience < 1:
            raise ValueError("max_rows and patience must be positive")
        self.max_rows = max_rows
        self.patience = patience
        self._for_medium = max_rows // _KEPT_ROWS
        self._for_short = max(self._for_medium, int(max_rows >= _FEWEST_ROWS))
        self._waiting: dict[int, _Waiting] = {}
        self._prefilling: dict[int, _Job] = {}  # in order of admission
        self._decoding: set[int] = set()
        self._short: set[int] = set()  # of those two
        self._medium: set[int] = set()  # of those two
        self._owed = 0  # milliseconds that others got, less what the oldest prefill's own slices paid back
        self._paid = False  # the oldest got a slice since a short one was done

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Foreground requests that were admitted; from any thread."""
        prefilling = tuple(self._prefilling.values())  # in one step: the MLX thread may change it at any time
        return len(self._decoding) + sum(not job.background for job in prefilling)

    @property
    def decoding(self) -> frozenset[int]:
        return frozenset(self._decoding)

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._prefilling or self._decoding)

    def add(self, uid: int) -> None:
        """A new request; it waits until `admit` lets it in."""
        if uid in self:
            raise ValueError(f"uid {uid} is scheduled already")
        self._waiting[uid] = _Waiting()

    def expect(self, uid: int, slices: int) -> None:
        """So many slices are left of a waiting request's prompt, as far as is known."""
        self._waiting[uid].slices = slices

    def add_background(self, uid: int) -> None:
        """A job that yields to every request. It needs no admission."""
        if uid in self:
            raise ValueError(f"uid {uid} is scheduled already")
        self._prefilling[uid] = _Job(uid, background=True)

    def __contains__(self, uid: int) -> bool:
        return uid in self._prefilling or uid in self._decoding or uid in self._waiting

    def next_waiting(self, passing: bool = False) -> int | None:
        """The request to admit next, if there is a row for it.

        Args:
            passing: there is no memory for the first one: a shorter one that may go before it, on a kept row.
        """
        first, running = next(iter(self._waiting), None), self.running
        if first is None or running >= self.max_rows:
            return None
        on_short = min(len(self._short), self._for_short)
        on_medium = min(len(self._short) - on_short + len(self._medium), self._for_medium)
        if not passing and running - on_short - on_medium < self.max_rows - self._for_short - self._for_medium:
            return first
        if passing and self._waiting[first].passed >= _PASSES:
            return None
        others = ((uid, waits) for uid, waits in self._waiting.items() if not passing or uid != first)
        medium = on_medium < self._for_medium
        short = medium or on_short < self._for_short
        return next((uid for uid, waits in others if (short and waits.short) or (medium and waits.medium)), None)

    def admit(self, uid: int, passing: bool = False) -> None:
        """Let a waiting request start its prefill. `passing`: as it was asked for."""
        waits = self._waiting[uid]
        # First: others read `waiting`, then `running`, and must find it in one.
        self._prefilling[uid] = _Job(uid, waits.short)
        if waits.short:
            self._short.add(uid)
        elif waits.medium:
            self._medium.add(uid)
        del self._waiting[uid]
        if passing:
            next(iter(self._waiting.values())).passed += 1

    def pick(self) -> int | None:
        """The prefill that gets the next slice."""
        jobs = [job for job in self._prefilling.values() if not job.background]
        if not jobs:
            if self._decoding or self._waiting:
                return None
            return next(iter(self._prefilling), None)
        hurried = next((job for job in jobs if job.hurried), None)
        if self._owed >= self.patience and not (self._paid and hurried):
            return jobs[0].uid
        if hurried is not None:
            return hurried.uid
        return min(reversed(jobs), key=lambda job: job.served).uid  # the latest arrival among equals

    def served(self, uid: int, tokens: int, ms: int) -> None:
        """Account for the slice that `pick` gave out: what it got done, and how long all others waited for it."""
        job = self._prefilling[uid]
        job.served += tokens
        job.slices += tokens > 0
        oldest = next((other for other in self._prefilling.values() if not other.background), None)
        if job is oldest:
            self._owed = max(0, self._owed - _OTHERS * ms)
            self._paid = self._paid or tokens > 0
        elif oldest is not None:
            self._owed = min(self._owed + ms, 2 * self.patience)
        if job.short and not job.hurried:
            self._paid = False

    def to_decode(self, uid: int) -> None:
        self._decoding.add(uid)
        self._end_prefill(uid)

    def remove(self, uid: int) -> None:
        """Finished, failed or cancelled, in whatever state."""
        self._waiting.pop(uid, None)
        self._end_prefill(uid)
        self._decoding.discard(uid)
        self._short.discard(uid)
        self._medium.discard(uid)

    def _end_prefill(self, uid: int) -> None:
        job = self._prefilling.pop(uid, None)
        if job is not None and job.short:
            self._paid = False


class _Speed:
    """Milliseconds per token of one kind of slice, `token + pair * depth`, from the latest slices.

    The depth of a slice is the mean number of tokens before its own: attention makes later slices slower.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)  # (depth, ms per token)
        self.latest = 0  # tokens

    def observe(self, tokens: int, offset: int, ms: float) -> None:
        self._seen.append((offset + tokens / 2, ms / tokens))
        self.latest = tokens

    def fitting(self, ms: float, offset: int) -> float:
        """The tokens behind `offset` that take `ms`."""
        token, pair = self._line()
        first = max(token + pair * offset, 1e-6)
        if pair * ms < 1e-9:
            return ms / first
        return (math.sqrt(first * first + 2 * pair * ms) - first) / pair

    def _line(self) -> tuple[float, float]:
        """The line through what was seen, neither negative nor falling."""
        seen = tuple(self._seen)  # in one step: plans ask from other threads
        depth, speed = (sum(values) / len(seen) for values in zip(*seen, strict=True))
        spread = sum((d - depth) ** 2 for d, _ in seen)
        pair = sum((d - depth) * (s - speed) for d, s in seen) / spread if spread > 0 else 0.0
        pair = min(max(pair, 0.0), speed / depth)
        return speed - pair * depth, pair


class SliceSizer:
    """Tokens per prefill slice, so that a slice fits between two tokens of the running answers.

    Args:
        largest: tokens per slice at most.
        smallest: below this a slice's fixed cost outweighs its work.
        target_ms: time a slice may take while answers are running.
    """

    def __init__(self, largest: int, smallest: int = 64, target_ms: float = 200.0) -> None:
        if not 0 < smallest <= largest or target_ms <= 0:
            raise ValueError("need 0 < smallest <= largest and a positive target_ms")
        self.largest = largest
        self.smallest = smallest
        self.target_ms = target_ms
        self._speeds: dict[str, _Speed] = {}

    def observe(self, kind: str, tokens: int, ms: float, offset: int = 0) -> None:
        """A slice of `tokens` behind `offset` others took `ms`."""
        if tokens > 0:
            speed = self._speeds.get(kind, _Speed())
            speed.observe(tokens, offset, ms)
            self._speeds[kind] = speed  # one that has seen nothing must not be found

    def size(self, kind: str, contended: bool, background: bool = False, offset: int = 0) -> int:
        """Tokens for the next slice of this kind: a power of two or `largest`, at most twice the slice before.

        From any thread.

        Args:
            contended: answers are running that wait for the slice.
            background: nobody wants the slice now.
            offset: tokens that come before it.
        """
        start = min(self.largest, _START * self.smallest)
        alone = not (contended or background)
        floor = min(self.largest, _ALONE_FLOOR * self.smallest) if alone else self.smallest
        speed = self._speeds.get(kind)
        if speed is None:
            return start
        share = _BACKGROUND if background else _ALONE if alone else 1
        fits = int(min(speed.fitting(self.target_ms * share, offset), max(start, 2 * speed.latest)))
        if fits >= self.largest:
            return self.largest
        return max(floor, 1 << max(fits, 1).bit_length() - 1)
