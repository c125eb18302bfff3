"""The memory that an engine holds, measured now."""

from __future__ import annotations

import mlx.core as mx

from mlx_specprefill import Engine


def unaccounted(engine: Engine) -> int:
    """Bytes that MLX holds, for this process, beside the engine's weights, caches and requests; no forward runs."""

    def balance() -> None:
        mx.synchronize()  # quantised attention on the CPU copies the keys and values that it reads
        engine.memory.check()

    engine._inbox.call(balance)
    return engine.stats().memory.unaccounted_bytes
