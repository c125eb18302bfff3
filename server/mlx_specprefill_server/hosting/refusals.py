"""Refusals to load a model, as clients get them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import ApiError
from ..sizes import size
from .entry import Entry

__all__ = [
    "RETRY_AFTER_S",
    "MissingModelError",
    "NoRoomError",
    "failed",
    "named",
    "reason_of",
    "too_little",
    "too_many",
]

RETRY_AFTER_S = "5"
FOLDERS = re.compile(r"(?<![\w.])~?/(?:[^\s/:,'\"]+/)*(?=[^\s/:,'\"])")  # the folders of an absolute path


class MissingModelError(ValueError):
    """A model's files are not on this machine; the message is meant for the user."""


class NoRoomError(ApiError):
    """A refusal to load a model while running requests use the memory it needs."""

    def __init__(self, entry: Entry, why: str) -> None:
        message = f"The model {entry.id!r} can't be loaded now: {why}. Try again when their requests have ended."
        super().__init__(503, message, code="no_room_for_model", headers={"Retry-After": RETRY_AFTER_S})


def reason_of(error: Exception) -> str:
    """Return the error's message without this machine's private folders. The log has the whole message."""
    return FOLDERS.sub("", str(error)) or type(error).__name__


def failed(entry: Entry) -> ApiError:
    """Return the refusal of a model that could not be loaded. It is not retried automatically."""
    message = f"The model {entry.id!r} could not be loaded: {entry.error}. POST /v1/models/{entry.id}/load tries again."
    return ApiError(500, message, param="model", code="model_failed")


def too_many(there: Sequence[Entry], most: int) -> str:
    """Return the reason: these models can't be unloaded."""
    return f"{named(there)} can't be unloaded, and --max-models is {most}"


def too_little(need: int, free: int) -> str:
    """Return the reason: too few bytes of memory."""
    return f"it needs {size(need)}, and what is in use leaves {size(max(0, free))}"


def named(entries: Sequence[Entry]) -> str:
    """Return the models' ids as text."""
    return ", ".join(entry.id for entry in entries)
