"""Which prefill gets the next slice. Integers only: no arrays, no clocks, no threads.

One tick of the engine is one decode step of all rows, then one prefill slice, or several short ones that take no longer
together. A running answer waits for `target_ms` or so at most.

- A prompt is short if its uncached tokens fit one slice of `target_ms`. It is brief if it has at most two fifths
  of the tokens of the median request; this does not depend on the speed of the machine, which is known roughly.
- Short and brief prompts go first, the fewest remaining tokens first; then the prefill that has got the fewest tokens.
  So a long newcomer catches up, and then all advance evenly.
- The oldest prefill gets a fifth of the time, but no two slices in a row while short or brief prompts wait. So a short
  prompt starts with the second slice at the latest, and no prefill starves: each is the oldest in the end.
- A prompt that is read to its end goes on at once: its last step takes no time.
- A quarter of the rows is reserved for short prompts, an eighth for short and brief ones.
- Background jobs (densification) run when there is no request.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

__all__ = ["Scheduler", "SliceSizer"]

MANY = 1 << 62  # tokens or slices: not known yet
_START = 4  # times `smallest`: tokens of the first slice, whose speed is not known yet
# With nothing decoding only a newcomer waits for a slice: it may take this times `target_ms`, and is not cut below this
# times `smallest`, because short slices cost large models more per token.
_ALONE, _ALONE_FLOOR = 1.5, 2
# In a crowd a newcomer is likely, and waits for the rest of the slice in work: none takes more than this times what the
# shortest prompts take, so that these feel it little; and no larger part of a slice is fixed cost.
_BRISK = 4
_CROWD = 3  # requests
_REMEMBERED = 48  # slices
_OTHERS = 4  # milliseconds that others may have for each of the oldest prefill's own
_BRIEF = 2, 5  # two fifths of the usual tokens, at most; with more, long answers hold the rows that are kept for these
# Times the expected tokens, after which a prefill does not go before others any more; the draft may read them too.
_WRONG = 2
# One of so many rows is kept: brief prompts of thousands of tokens hold theirs for long answers, short ones come often.
_SHORT_ROWS, _BRIEF_ROWS = 4, 8
_PASSES = 64  # times that a request for which there is no memory lets a short one pass
_BACKGROUND = 0.25  # times `target_ms`: a request that comes meanwhile waits for the rest of the slice


@dataclass
class _Prefill:
    uid: int
    tokens: int = MANY  # of the prompt that were to be read when it was admitted
    hurry: int = 0  # tokens until which it goes before long ones
    background: bool = False
    served: int = 0  # tokens of prefill done
    read: bool = False  # to its end, with its latest slice

    @property
    def hurried(self) -> bool:
        return self.served < self.hurry


@dataclass
class _Waiting:
    slices: int = MANY  # full ones, expected
    tokens: int = MANY  # expected
    passed: int = 0  # by others, for want of memory

    @property
    def short(self) -> bool:
        return self.slices == 1


class Scheduler:
    """Waiting, prefilling and decoding requests by uid.

    Args:
        max_rows: requests that may hold a cache at once (prefilling or decoding); the rest wait in order of arrival.
            A quarter of them is for short ones, an eighth for short and brief ones.
        patience: milliseconds that may go to others before the oldest prefill must get a slice.
    """

    def __init__(self, max_rows: int = 32, patience: int = 800) -> None:
        if max_rows < 1 or patience < 1:
            raise ValueError("max_rows and patience must be positive")
        self.max_rows = max_rows
        self.patience = patience
        self._for_brief = max_rows // _BRIEF_ROWS
        self._for_short = max_rows // _SHORT_ROWS
        self._waiting: dict[int, _Waiting] = {}
        self._prefilling: dict[int, _Prefill] = {}  # in order of admission
        self._decoding: set[int] = set()
        self._short: set[int] = set()  # of those two
        self._brief: set[int] = set()  # of those two
        self._tokens: dict[int, int] = {}  # of all of them that came as requests, as expected
        self._owed = 0  # milliseconds that others got, less what the oldest prefill's own slices paid back
        self._spared = 0  # milliseconds that hurried ones may have before the oldest's next slice

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
    def crowded(self) -> bool:
        """So many requests are there that the next one is likely to come soon; from any thread."""
        return self.running + self.waiting >= _CROWD

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._prefilling or self._decoding)

    def add(self, uid: int) -> None:
        """A new request; it waits until `admit` lets it in."""
        if uid in self:
            raise ValueError(f"uid {uid} is scheduled already")
        self._waiting[uid] = _Waiting()
        self._tokens[uid] = MANY

    def expect(self, uid: int, slices: int, tokens: int = 1) -> None:
        """So many full slices, and tokens, are left of a waiting request's prompt, as far as is known."""
        waits = self._waiting[uid]
        waits.slices, waits.tokens = slices, tokens
        self._tokens[uid] = tokens

    def add_background(self, uid: int) -> None:
        """A job that yields to every request. It needs no admission."""
        if uid in self:
            raise ValueError(f"uid {uid} is scheduled already")
        self._prefilling[uid] = _Prefill(uid, background=True)

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
        on_brief = min(len(self._short) - on_short + len(self._brief), self._for_brief)
        if not passing and running - on_short - on_brief < self.max_rows - self._for_short - self._for_brief:
            return first
        if passing and self._waiting[first].passed >= _PASSES:
            return None
        brief = on_brief < self._for_brief
        short = brief or on_short < self._for_short
        others = ((uid, waits) for uid, waits in self._waiting.items() if not passing or uid != first)
        most = self._most_brief()
        return next(
            (uid for uid, w in others if (short and w.short) or (brief and not w.short and w.tokens <= most)), None
        )

    def _most_brief(self) -> int:
        """Tokens of a brief prompt, at most, by the median of all requests that are here."""
        return _BRIEF[0] * statistics.median_high(self._tokens.values()) // _BRIEF[1]

    def admit(self, uid: int, passing: bool = False) -> None:
        """Let a waiting request start its prefill. `passing`: as it was asked for."""
        waits = self._waiting[uid]
        brief = not waits.short and waits.tokens <= self._most_brief()
        hurry = _WRONG * waits.tokens if brief or waits.short else 0
        # First: others read `waiting`, then `running`, and must find it in one.
        self._prefilling[uid] = _Prefill(uid, waits.tokens, hurry)
        if waits.short:
            self._short.add(uid)
        elif brief:
            self._brief.add(uid)
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
        if (read := next((job for job in jobs if job.read), None)) is not None:
            return read.uid
        hurried = min((job for job in jobs if job.hurried), key=lambda job: job.tokens - job.served, default=None)
        if self._owed >= self.patience and (hurried is None or self._spared <= 0):
            return jobs[0].uid
        if hurried is not None:
            return hurried.uid
        return min(reversed(jobs), key=lambda job: job.served).uid  # the latest arrival among equals

    def served(self, uid: int, tokens: int, ms: int, read: bool = False) -> None:
        """PrefillReport for the slice that `pick` gave out: what it got done, and how long all others waited for it.

        Args:
            read: nothing is left of the prompt.
        """
        job = self._prefilling[uid]
        job.read = read
        job.served += tokens
        oldest = next((other for other in self._prefilling.values() if not other.background), None)
        if job is oldest:
            self._owed = max(0, self._owed - _OTHERS * ms)
            # At least one slice of another, however short its own was.
            self._spared = max(min(self._spared, 0) + _OTHERS * ms, int(tokens > 0))
        elif oldest is not None:
            self._owed = min(self._owed + ms, 2 * self.patience)
            self._spared -= ms if self._spared > 0 and tokens > 0 else 0  # steps without tokens are no slices

    def to_decode(self, uid: int) -> None:
        self._decoding.add(uid)
        self._prefilling.pop(uid, None)

    def remove(self, uid: int) -> None:
        """Finished, failed or cancelled, in whatever state."""
        self._waiting.pop(uid, None)
        self._prefilling.pop(uid, None)
        self._decoding.discard(uid)
        self._short.discard(uid)
        self._brief.discard(uid)
        self._tokens.pop(uid, None)


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

    def ms(self, tokens: int, offset: int) -> float:
        """What so many tokens behind `offset` take."""
        token, pair = self._line()
        return tokens * (token + pair * (offset + tokens / 2))

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
        self._shortest: deque[float] = deque(maxlen=_REMEMBERED)  # milliseconds of slices that are no longer than that

    def observe(self, kind: str, tokens: int, ms: float, offset: int = 0) -> None:
        """A slice of `tokens` behind `offset` others took `ms`."""
        if tokens > 0:
            speed = self._speeds.get(kind, _Speed())
            speed.observe(tokens, offset, ms)
            self._speeds[kind] = speed  # one that has seen nothing must not be found

    def observe_short(self, ms: float) -> None:
        """The last slice of a prompt, of `smallest` tokens at most, took `ms`."""
        self._shortest.append(ms)

    def full_slices(self, kind: str, tokens: int, offset: int = 0) -> int:
        """How many slices of `target_ms`, or of `smallest`, it takes to read `tokens` behind `offset` others.

        From any thread. How long slices are at the moment has no part in it.
        """
        speed = self._speeds.get(kind)
        if speed is None:
            full = tokens / min(self.largest, _START * self.smallest)
        else:
            full = min(speed.ms(tokens, offset) / self.target_ms, tokens / self.smallest)
        return max(1, math.ceil(full))

    def size(self, kind: str, contended: bool, background: bool = False, offset: int = 0, crowded: bool = False) -> int:
        """Tokens for the next slice of this kind: a power of two or `largest`, at most twice the slice before.

        From any thread.

        Args:
            contended: answers are running that wait for the slice.
            background: no request is waiting for the slice.
            offset: tokens that come before it.
            crowded: newcomers are likely, who wait for the rest of it.
        """
        start = min(self.largest, _START * self.smallest)
        alone = not (contended or background or crowded)
        floor = min(self.largest, _ALONE_FLOOR * self.smallest) if alone else self.smallest
        speed = self._speeds.get(kind)
        if speed is None:
            return start
        ms = self.target_ms * (_BACKGROUND if background else _ALONE if alone else 1)
        if crowded and self._shortest:
            shortest = sorted(self._shortest)  # some lie behind long prompts
            ms = min(ms, _BRISK * shortest[len(shortest) // 4])
        fits = int(min(speed.fitting(ms, offset), max(start, 2 * speed.latest)))
        if fits >= self.largest:
            return self.largest
        return max(floor, 1 << max(fits, 1).bit_length() - 1)
