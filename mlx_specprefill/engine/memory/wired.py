"""Wired memory: how many bytes macOS is to keep resident for the models."""

from __future__ import annotations

import logging
import platform

import mlx.core as mx

from ...config import WiredLimit

log = logging.getLogger(__name__)
_WIRES = 15  # macOS since which MLX can


def wired_bytes(choice: WiredLimit, weights: int, recommended: int | None) -> int:
    """Return the bytes to wire, 0 for none.

    Args:
        weights: bytes of the models.
        recommended: the device's working set in bytes; None: it can't wire.
    """
    if recommended is None or choice == "off":
        return 0
    return recommended if choice == "on" else min(weights, recommended)


def wire(choice: WiredLimit, weights: int) -> int:
    """Limit the memory that macOS 15 and later keeps resident for MLX by `wired_bytes`; return the bytes.

    Unwired, models above some 60 to 75 % of memory decode 20 to 150 times slower (mlx-examples issue 1061, vmlx-swift
    issue 418), and smaller ones read prompts up to 31 % slower (ollama issue 17367). With caches wired, too, kernels
    panicked under concurrent requests (mlx issue 3186).
    """
    release = platform.mac_ver()[0].split(".")[0]
    recommended = mx.device_info().get("max_recommended_working_set_size") if int(release or 0) >= _WIRES else None
    nbytes = wired_bytes(choice, weights, int(recommended) if recommended else None)
    if nbytes:
        mx.set_wired_limit(nbytes)
        why = "as asked for" if choice == "on" else "the weights"
        log.info("%.1f GB are wired, %s; MLX_SPECPREFILL_WIRED_LIMIT=off leaves them to macOS", nbytes / 1e9, why)
    return nbytes
