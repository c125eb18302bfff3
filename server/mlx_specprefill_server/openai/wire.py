"""What the endpoints of OpenAI's dialect write the same way: envelope, logprobs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from mlx_specprefill import Logprob, TokenEvent

from .. import __version__
from ..generating.vocabulary import Vocabulary

__all__ = ["LOWEST_LOGPROB", "Envelope", "scored"]

LOWEST_LOGPROB = -9999.0  # JSON has no -inf


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every chunk of one response shares."""

    id: str
    object: str
    model: str
    created: int
    null_usage: bool = False  # OpenAI's streams carry "usage": null until the last chunk when usage is asked for

    @classmethod
    def new(cls, prefix: str, kind: str, model: str, null_usage: bool = False) -> Envelope:
        return cls(f"{prefix}-{uuid4().hex}", kind, model, int(time.time()), null_usage)

    def body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A whole response or one chunk."""
        head = {"id": self.id, "object": self.object, "created": self.created, "model": self.model}
        usage = {"usage": None} if self.null_usage else {}
        return {**head, "system_fingerprint": f"mlx-specprefill-{__version__}", "choices": choices, **usage, **more}


def scored(vocabulary: Vocabulary, event: TokenEvent) -> dict[str, Any]:
    """A token as an entry of OpenAI's logprobs."""
    own = Logprob(event.token, LOWEST_LOGPROB if event.logprob is None else event.logprob)
    return _entry(vocabulary, own) | {"top_logprobs": [_entry(vocabulary, other) for other in event.top_logprobs]}


def _entry(vocabulary: Vocabulary, one: Logprob) -> dict[str, Any]:
    return {
        "token": vocabulary.token_text(one.token),
        "logprob": max(one.logprob, LOWEST_LOGPROB),
        "bytes": vocabulary.token_bytes(one.token),
    }
