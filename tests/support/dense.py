"""The exact cache's part of a prompt, compared with full reading."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mlx_specprefill import Engine, GenerationRequest
from tests.support.precision import assert_close
from tests.support.steps import finish


def assert_is_full_reading(engine: Engine, request: GenerationRequest) -> int:
    """Behind what the exact cache holds of a prompt, the target answers as behind the whole one. Return its length."""

    def behind() -> tuple[int, Any, Any]:
        hit = finish(engine.caches.target_prefix(request.prompt, request.label, again=True))
        start, cache = (0, None) if hit is None else (hit.length, hit.cache)
        tokens = mx.array(request.prompt)[None]
        found, whole = engine.pair.target(tokens[:, start:], cache=cache)[0], engine.pair.target(tokens)[0, start:]
        return start, *(np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)) for logits in (found, whole))

    start, found, whole = engine._inbox.call(behind)
    assert_close(found, whole, atol=1e-4)
    return start
