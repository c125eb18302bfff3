"""Records the target's final hidden states, the input of its output projection, after the last norm.

The inner text model of a Qwen3.5 returns them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .capture import Active

__all__ = ["recorded_hidden", "wrap_hidden"]

_states: Active[list[mx.array]] = Active()


def wrap_hidden(call: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Wrap a text model's `__call__` to show its output to the active recording."""

    @wraps(call)
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
        hidden = call(module, *args, **kwargs)
        if _states.value is not None:
            _states.value.append(hidden)
        return hidden

    return run


@contextmanager
def recorded_hidden() -> Iterator[list[mx.array]]:
    """Collect the hidden states (B, L, D) of the forwards on this thread, in order."""
    with _states.during([]) as states:
        yield states
