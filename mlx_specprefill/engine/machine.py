"""Describes the machine that runs the models."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

import mlx.core as mx

from .admission.footprint import default_limit, physical_memory

__all__ = ["Machine", "machine"]


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
