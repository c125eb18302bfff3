"""The last answers with their accounts. Never what was said."""

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
        # One line for each caller: how soon an answer is pushed out would tell of the others.
        self._answers: defaultdict[str, deque[dict[str, Any]]] = defaultdict(partial(deque, maxlen=HELD))

    def add(self, outcome: Outcome, request_id: str | None, caller: str) -> None:
        account = outcome.event.account
        self._answers[caller].appendleft(
            {
                "request_id": request_id,
                "ended": round(time.time(), 3),
                "finish": outcome.reason,
                "completion_tokens": outcome.event.completion_tokens if isinstance(outcome.event, Finished) else 0,
                "specprefill": None if account is None else account.to_dict(),
            }
        )

    def newest_first(self, caller: str | None) -> list[dict[str, Any]]:
        """Those to one caller; None: to all."""
        shown = self._answers.values() if caller is None else [self._answers.get(caller, ())]
        return list(islice(merge(*shown, key=itemgetter("ended"), reverse=True), HELD))
