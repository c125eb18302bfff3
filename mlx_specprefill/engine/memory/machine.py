"""This machine, described: device, processor, memory, and the memory limit unless one is set."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import mlx.core as mx

_SHARE_OF_WORKING_SET = 0.9  # of the device's memory or recommendation: MLX frees its cached memory above .95 of it
_SHARE_OF_RAM = 0.8  # of physical memory, if the device states neither


def default_limit() -> int | None:
    """Return the bytes that weights, sequences and caches may use together."""
    info = mx.device_info()
    if memory := info.get("max_recommended_working_set_size") or info.get("total_memory"):  # by Metal, by CUDA
        return int(_SHARE_OF_WORKING_SET * int(memory))
    ram = physical_memory()
    return int(_SHARE_OF_RAM * ram) if ram else None


def device_memory() -> int | None:
    """Return the bytes of a CUDA device's own memory, else of RAM; None if the system does not report them."""
    own = mx.device_info().get("total_memory")
    return int(own) if own else physical_memory()


def physical_memory() -> int | None:
    """Return the bytes of RAM; None if the system does not report them."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def mac_limit(memory: int) -> int:
    """Return what `default_limit` is on a Mac with so many bytes of RAM: Metal recommends two thirds of them, or three
    quarters from 36 GB on.
    """
    return int(_SHARE_OF_WORKING_SET * memory * (3 / 4 if memory >= 36 << 30 else 2 / 3))


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
