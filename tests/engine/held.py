"""What an engine holds, looked at now."""

from __future__ import annotations

from mlx_specprefill import Engine


def unaccounted(engine: Engine) -> int:
    """Bytes that MLX holds, for this process, beside the engine's weights, caches and requests."""
    engine._inbox.call(lambda: engine.memory.balance(engine.loop.jobs.values(), engine.rows.nbytes))
    return engine.stats().memory.unaccounted_bytes
