"""The memory that an engine holds, measured now."""

from __future__ import annotations

import mlx.core as mx

from mlx_specprefill import Engine


def unaccounted(engine: Engine) -> int:
    """Bytes that MLX holds, for this process, beside the weights and prefixes of an engine without requests."""

    def balance() -> int:
        mx.synchronize()  # quantised attention on the CPU copies the keys and values that it reads
        return mx.get_active_memory() - engine.memory.weights - engine.caches.nbytes

    return engine._inbox.call(balance)
