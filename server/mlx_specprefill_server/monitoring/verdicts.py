"""The verdicts on the last sparse answers of each API key, and counts of all. Used on the event loop."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from typing import Any

from .answers import NewestAnswers

logger = logging.getLogger(__name__)

OPEN = "pending"


class AnswerVerdict:
    """The verdict on one answer, before and after it is known.

    Args:
        index: of the answer among those of its request.

    Attributes:
        word: the verdict, or "pending".
    """

    def __init__(self, request_id: str | None, index: int, model: str) -> None:
        self.request_id = request_id
        self.word = OPEN
        ended = round(time.time(), 3)
        self._fields = {"request_id": request_id, "ended": ended, "model": model, "index": index}

    def tell(self, word: str) -> None:
        """Note the verdict, and write one line to the log."""
        self.word = word
        logger.info("verdict %s", word, extra={"fields": self.to_dict()})

    def to_dict(self) -> dict[str, Any]:
        return self._fields | {"verdict": self.word}


class Verdicts(NewestAnswers[AnswerVerdict]):
    """The last answers' verdicts by API key, and counts of all since the start."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def count(self, identity: str, word: str) -> None:
        self._counts[identity][word] += 1

    def counts(self, identity: str | None) -> dict[str, int]:
        """Return the verdicts since the start, and how many of the last answers have none yet."""
        shown = self._counts.values() if identity is None else [self._counts.get(identity, Counter())]
        total = sum(shown, Counter[str]())
        waiting = sum(answer.word == OPEN for answer in self.newest_first(identity))
        return {word: total[word] for word in ("same", "differs", "unknown")} | {OPEN: waiting}
