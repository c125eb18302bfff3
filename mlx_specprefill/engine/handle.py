"""The caller's end of a submitted request."""

from __future__ import annotations

import threading

__all__ = ["RequestHandle"]


class RequestHandle:
    """Usable from any thread, also after the request's last event."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._expecting = threading.Event()

    def cancel(self) -> None:
        """Stop within one slice of work; the last event is then `Finished` with reason "cancelled"."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def expect_more(self) -> None:
        """The conversation certainly goes on, because the answer called a tool: its text is worth preparing first."""
        self._expecting.set()

    @property
    def expecting(self) -> bool:
        return self._expecting.is_set()
