"""The last answers with their accounts. Never what was said."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from mlx_specprefill import Finished

from ..generating.generation import Ended

__all__ = ["RecentAnswers"]

HELD = 50


class RecentAnswers:
    """Used on the event loop."""

    def __init__(self) -> None:
        self._answers: deque[dict[str, Any]] = deque(maxlen=HELD)

    def add(self, end: Ended, request_id: str | None) -> None:
        account = end.event.account
        self._answers.appendleft(
            {
                "request_id": request_id,
                "ended": round(time.time(), 3),
                "finish": end.reason,
                "completion_tokens": end.event.completion_tokens if isinstance(end.event, Finished) else 0,
                "specprefill": None if account is None else account.to_dict(),
            }
        )

    def newest_first(self) -> list[dict[str, Any]]:
        return list(self._answers)
