"""The last answers with their accounts. Never any content."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from functools import partial
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import Any

from mlx_specprefill import Finished

from ..generating.generation import Outcome

__all__ = ["RecentAnswers"]

HELD = 50


class RecentAnswers:
    """Used on the event loop."""

    def __init__(self) -> None:
        # One queue per API key: how soon an answer is pushed out of a common one would tell about other keys' traffic.
        self._answers: defaultdict[str, deque[dict[str, Any]]] = defaultdict(partial(deque, maxlen=HELD))

    def add(self, outcome: Outcome, request_id: str | None, identity: str) -> None:
        account = outcome.event.account
        self._answers[identity].appendleft(
            {
                "request_id": request_id,
                "ended": round(time.time(), 3),
                "finish": outcome.reason,
                "completion_tokens": outcome.event.completion_tokens if isinstance(outcome.event, Finished) else 0,
                "specprefill": None if account is None else account.to_dict(),
            }
        )

    def newest_first(self, identity: str | None) -> list[dict[str, Any]]:
        """Those to one API key, by its identity's name; None: to all."""
        shown = self._answers.values() if identity is None else [self._answers.get(identity, ())]
        return list(islice(merge(*shown, key=itemgetter("ended"), reverse=True), HELD))
