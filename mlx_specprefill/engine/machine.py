"""The machine that runs the models: its description, and the memory that macOS keeps resident."""

from __future__ import annotations

import logging
import os
import platform
from dataclasses import dataclass

import mlx.core as mx

from ..config import WiredLimit

_SHARE_OF_WORKING_SET = 0.9  # of the device's memory or recommendation: MLX frees its cached memory above .95 of it
_SHARE_OF_RAM = 0.8  # of physical memory, if the device states neither


def default_limit() -> int | None:
    """Return the bytes that weights, sequences and caches may use together."""
    info = mx.device_info()
    if memory := info.get("max_recommended_working_set_size") or info.get("total_memory"):  # by Metal, by CUDA
        return int(_SHARE_OF_WORKING_SET * int(memory))
    ram = physical_memory()
    return int(_SHARE_OF_RAM * ram) if ram else None


def physical_memory() -> int | None:
    """Return the bytes of RAM; None if the system does not report them."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine, as MLX and the system report it.

    Attributes:
        device: of MLX, "gpu" or "cpu"; `name` is the GPU's or the processor's.
        has_metal: MLX found a Metal device, used or not.
        cores: of the processor.
        memory: bytes of RAM; `memory_limit`: of those, what weights, requests and caches may use unless set
            otherwise. None where the system doesn't say.
    """

    device: str
    has_metal: bool
    name: str
    cores: int
    memory: int | None
    memory_limit: int | None


def machine() -> Machine:
    """Ask MLX and the system. Loads nothing."""
    device = "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"
    name = mx.device_info().get("device_name") or platform.processor() or platform.machine()
    return Machine(device, mx.metal.is_available(), str(name), os.cpu_count() or 1, physical_memory(), default_limit())


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
