"""Limits the memory of all requests' bodies: large ones count until their request ends, also in the queue.

Tools that are remembered count, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import RETRY_AFTER_S, ApiError

FREE = 1 << 18  # bytes that each body has besides: the requests of most agents
LIMIT = 1 << 29  # bytes


@dataclass(slots=True)
class BodyRoom:
    """The bytes that bodies have taken beyond what each has free. Used on the event loop."""

    taken: int = 0


@dataclass(slots=True)
class BodyPlace:
    """The part of one body in the room, until its request ends."""

    room: BodyRoom
    own: int = 0

    def grow(self, size: int) -> None:
        """Take room for a body that has `size` bytes now; refuse it by an ApiError (503) where there is none."""
        if size > FREE:
            self.take(size - FREE - self.own)

    def take(self, more: int) -> None:
        """Take room for `more` bytes, or give back less than 0; refuse as `grow`."""
        if self.room.taken + more > LIMIT:
            message = f"The bodies of other requests take the {LIMIT} bytes that are meant for them. Try again."
            raise ApiError(503, message, code="engine_unavailable", headers={"Retry-After": RETRY_AFTER_S})
        self.own += more
        self.room.taken += more

    def close(self) -> None:
        self.room.taken -= self.own
