"""The exceptions, as a tree; and MLX's messages that mean that the device has failed.

SpecPrefillError
├── InvalidRequestError        the request itself is wrong (HTTP 400); `.field` names the offending field
│   └── ContextLengthError     prompt + completion do not fit the context window (HTTP 400)
├── LoadError                  a checkpoint can't be loaded
│   └── PairMismatchError      a draft with another tokenizer can't read the target's text
├── SettingsError              the engine can't run as it is configured, here or with these models
├── SparseUnsupportedError     this model or cache can't be prefilled sparsely; its text is shown to the user
├── EngineError                the engine failed on one request (HTTP 500)
│   └── EngineClosedError      the engine is not running or its queue is full (HTTP 503)
│       └── DeviceError        the device failed on the request, or takes no more work
└── RequestCancelled           the caller gave up; not an error, never counted as a fallback
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DeviceErrorKind = Literal["memory", "timeout", "refused", "other"]
_WORDS: dict[DeviceErrorKind, tuple[str, ...]] = {
    "memory": (
        "Insufficient Memory",
        "kIOGPUCommandBufferCallbackErrorOutOfMemory",
        "[metal::malloc]",
        "[malloc] Unable to allocate",
    ),
    "timeout": ("Caused GPU Timeout", "Impacting Interactivity"),
    "refused": ("Ignored (for causing prior/excessive GPU errors)",),
    "other": ("[METAL]",),
}


class SpecPrefillError(Exception):
    """Root of all exceptions that this library raises on purpose."""


class InvalidRequestError(SpecPrefillError, ValueError):
    """A request that can never succeed as sent. `field` is the invalid request field, if there is one."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextLengthError(InvalidRequestError):
    """The prompt is longer than the model's context window. Counts are tokens."""

    def __init__(self, prompt_tokens: int, max_tokens: int, context_length: int, field: str = "messages") -> None:
        super().__init__(
            f"This model's maximum context length is {context_length} tokens. However, you requested "
            f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the messages, {max_tokens} in the completion). "
            "Please reduce the length of the messages or completion.",
            field=field,
        )
        self.prompt_tokens = prompt_tokens
        self.total_tokens = prompt_tokens + max_tokens
        self.context_length = context_length


class LoadError(SpecPrefillError):
    """A checkpoint is missing, broken or of an unknown type."""


class PairMismatchError(LoadError):
    """Two tokenizers that should be equal differ, or a text can't be mapped from one to the other."""


class SettingsError(SpecPrefillError):
    """A setting that this machine or these models can't fulfil. The message names the change to make."""


class SparseUnsupportedError(SpecPrefillError):
    """Sparse prefill of a model or cache that can't do it exactly."""


class EngineError(SpecPrefillError):
    """One request failed inside the engine; other requests are unaffected."""


class EngineClosedError(EngineError):
    """The engine accepts no request now: not started, shutting down, or its queue is full."""


class DeviceError(EngineClosedError):
    """The device is out of memory, has aborted a computation, or refuses work. The message names the remedy."""


class RequestCancelled(SpecPrefillError):  # noqa: N818 - a control signal, not an error
    """Raised between two steps after the caller cancelled."""


def device_error(error: BaseException) -> DeviceErrorKind | None:
    """Return the kind of the device's error, by MLX's message; None for other errors."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    return next((kind for kind, words in _WORDS.items() if any(word in text for word in words)), None)


@dataclass(frozen=True, slots=True)
class Refused:
    """Stands in place of something that these models can't do, and says why."""

    reason: str
