"""The target's final hidden states, read where its output projection gets them: after the last norm.

The inner text model of a Qwen3.5 returns them. Its class is wrapped once, and inert unless a recording is active on the
calling thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn

__all__ = ["install_hidden", "recorded_hidden"]

_active = threading.local()


def install_hidden(text_model: nn.Module) -> None:
    """Let the outputs of this module's class be recorded."""
    kind = type(text_model)
    if not hasattr(kind.__call__, "__wrapped__"):
        kind.__call__ = _recordable(kind.__call__)


def _recordable(call: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @wraps(call)
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
        hidden = call(module, *args, **kwargs)
        seen: list[mx.array] | None = getattr(_active, "seen", None)
        if seen is not None:
            seen.append(hidden)
        return hidden

    return run


@contextmanager
def recorded_hidden() -> Iterator[list[mx.array]]:
    """Collects the hidden states (B, L, D) of the forwards on this thread, in order."""
    seen: list[mx.array] = []
    _active.seen = seen
    try:
        yield seen
    finally:
        _active.seen = None
