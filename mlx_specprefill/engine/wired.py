"""Wired memory: how many bytes macOS is to keep resident for the models."""

from __future__ import annotations

import logging

import mlx.core as mx

from ..config import WiredLimit
from .machine import physical_memory

log = logging.getLogger(__name__)
_LARGE = 0.6  # of memory: weights above it are wired by "auto"


def wired_bytes(choice: WiredLimit, weights: int, caches: int, memory: int | None, recommended: int | None) -> int:
    """Return the bytes to wire, 0 for none.

    Args:
        weights, caches: bytes of the models, and those that prompts may keep.
        memory: bytes of the machine, None: unknown.
        recommended: the device's working set in bytes; None: it names none, so it can't wire.
    """
    if recommended is None or choice == "off":
        return 0
    if choice == "on":
        return recommended
    if memory is None or weights <= _LARGE * memory:
        return 0
    return min(weights + caches, recommended)


def wire(choice: WiredLimit, weights: int, caches: int) -> int:
    """Limit the memory that macOS 15 and later keeps resident for MLX by `wired_bytes`; return the bytes.

    Unwired, models above some 60 to 75 % of memory decode 20 to 150 times slower (mlx-examples issue 1061, vmlx-swift
    issue 418). Wired, kernels panicked under concurrent requests (mlx issue 3186).
    """
    memory = physical_memory()
    recommended = mx.device_info().get("max_recommended_working_set_size")
    nbytes = wired_bytes(choice, weights, caches, memory, int(recommended) if recommended else None)
    if nbytes:
        mx.set_wired_limit(nbytes)
        why = "as asked for" if choice == "on" else f"the weights take {weights / (memory or 1):.0%} of memory"
        log.info("%.1f GB are wired, %s; --wired-limit off leaves them to macOS", nbytes / 1e9, why)
    return nbytes
