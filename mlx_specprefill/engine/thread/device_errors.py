"""Errors of the device: out of memory, timeouts, refusals. What is done about each, and when the device is given up."""

from __future__ import annotations

import logging
from collections.abc import Callable

import mlx.core as mx

from ...errors import DeviceError, DeviceErrorKind, device_error
from ..memory.reservations import Memory
from ..prefixes.caches import EngineCaches
from ..requests.failures import strip_traceback

log = logging.getLogger(__name__)
_MOST = 3  # errors without a token between them after which the device is given up


class DeviceErrors:
    """Acts on device errors, so that the next request can succeed. MLX thread only, except `fatal`.

    MLX reports them as RuntimeErrors with a message only.

    Args:
        halve: halves the longest prefill chunk; returns its tokens.

    Attributes:
        fatal: why the device is unusable until a restart; None while it works.
    """

    def __init__(self, caches: EngineCaches, memory: Memory, halve: Callable[[], int]) -> None:
        self._caches = caches
        self._memory = memory
        self._halve = halve
        self._latest: Exception | None = None
        self._advice = ""
        self._in_a_row = 0
        self.fatal: str | None = None

    def explain(self, error: Exception) -> Exception:
        """Return the error for the client of a failed request."""
        if device_error(error) is None:
            return error
        self.note(error)
        return DeviceError(self.fatal or f"the device failed on this request: {error}. {self._advice}")

    def note(self, error: Exception) -> None:
        """Handle an error once, even if several rows fail with it. Ignores errors that are not the device's."""
        kind = device_error(error)
        if kind is None or error is self._latest:
            return
        self._latest = strip_traceback(error)
        self._in_a_row += 1
        if kind == "refused" or self._in_a_row >= _MOST:
            self.fatal = f"the device takes no more work, this server has to be started again: {error}"
            log.critical(self.fatal)
            return
        self._advice = self._act(kind)
        log.error("the device failed: %s. %s", error, self._advice)

    def note_token(self) -> None:
        """Note that a token was computed."""
        self._in_a_row = 0

    def _act(self, kind: DeviceErrorKind) -> str:
        """Handle one kind of error; return what was done and what the user can do."""
        if kind == "memory":
            self._make_room()
            return (
                "Cached prompts were dropped and less memory is planned with. Send it again or shorten it; if it fails "
                "again, close other programs, or start the server with a lower --memory-limit."
            )
        if kind == "timeout":
            return f"Prompts are read {self._halve()} tokens at a time at most from now on. Send it again."
        return "Send it again."

    def _make_room(self) -> None:
        try:
            self._caches.budget.shrink(self._caches.nbytes)
        except RuntimeError:
            log.exception("cached prompts could not be dropped")  # what goes to disk is copied first
        mx.clear_cache()
        self._memory.lower_limit()
