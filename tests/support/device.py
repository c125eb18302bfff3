"""The device that the suite computes on: MLX's own choice, or with `--device cpu` the CPU, which a Mac has too."""

from __future__ import annotations

import mlx.core as mx
import pytest

__all__ = ["choose_device", "skip_other_processes"]


def choose_device(config: pytest.Config) -> None:
    if config.getoption("--device") == "cpu":
        mx.set_default_device(mx.cpu)


def skip_other_processes(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip items that start processes of their own, where a device was chosen: these would take another one."""
    if config.getoption("--device"):
        for item in items:
            item.add_marker(pytest.mark.skip(reason="it starts processes, which take MLX's own choice of a device"))
