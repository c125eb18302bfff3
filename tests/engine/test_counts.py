"""The host's waits for the device. Each wait is a pause of the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np
import pytest

from mlx_specprefill import Engine, EngineConfig, GenerationRequest, ModelPair, SpecPrefillOptions
from tests.support.tiny import tiny_pair

from .test_staged import own_pair


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count what any thread asks of MLX while the block runs: `queued` evaluations, and `waits` for values."""
    counts: Counter[str] = Counter()

    def counting(kind: str, call: Callable[..., Any], only: bool = False) -> Callable[..., Any]:
        def counted_call(*args: Any, **kwargs: Any) -> Any:
            if not only or (args and isinstance(args[0], mx.array)):
                counts[kind] += 1
            return call(*args, **kwargs)

        return counted_call

    with (
        patch.object(mx, "async_eval", counting("queued", mx.async_eval)),
        patch.object(mx, "eval", counting("waits", mx.eval)),
        patch.object(mx, "synchronize", counting("waits", mx.synchronize)),
        patch.object(mx.array, "item", counting("waits", mx.array.item)),
        patch.object(mx.array, "tolist", counting("waits", mx.array.tolist)),
        patch.object(np, "array", counting("waits", np.array, only=True)),
        patch.object(np, "asarray", counting("waits", np.asarray, only=True)),
    ):
        yield counts


def per_part(pair: ModelPair, step: int = 64) -> Mapping[str, Mapping[str, float]]:
    """Return the counts per further prefill chunk, full and sparse, and per further token of an answer.

    What a request costs once drops out: each is the difference of two requests of different lengths.
    """
    config = EngineConfig(prefill_step=step, prefix_cache_bytes=0)
    config = replace(config, policy=replace(config.policy, densify=False))
    with Engine(pair, config) as engine:

        def cost(chunks: int, tokens: int, sparse: bool) -> Counter[str]:
            prompt = np.random.default_rng(0).integers(10, pair.vocab_size, chunks * step).tolist()
            request = GenerationRequest(prompt, tokens, specprefill=SpecPrefillOptions(sparse))
            list(engine.generate(request))  # the first of a kind sets things up
            with counted() as counts:
                list(engine.generate(request))
            return counts

        def between(more: Counter[str], less: Counter[str], by: int) -> dict[str, float]:
            return {kind: (more[kind] - less[kind]) / by for kind in ("queued", "waits")}

        found = {}
        for name, sparse in (("full", False), ("sparse", True)):
            base = cost(8, 4, sparse)
            found[f"{name}, prefill chunk"] = between(cost(24, 4, sparse), base, 16)
            found[f"{name}, decode step"] = between(cost(8, 20, sparse), base, 16)
        return found


def test_every_kind_of_wait_is_counted() -> None:
    with counted() as counts:
        x = mx.array([1, 2]) + 1
        mx.async_eval(x)
        mx.eval(x)
        np.array(x)
        np.asarray(x)
        x.tolist()
        x[0].item()
        np.array([1])
    assert counts == {"queued": 1, "waits": 5}
    x.tolist()
    assert counts["waits"] == 5


@pytest.mark.parametrize(
    "pair", [tiny_pair("llama"), tiny_pair("qwen3_5"), own_pair()], ids=["llama", "qwen3_5", "own layers"]
)
def test_the_host_waits_once_per_token_and_twice_per_prefill_chunk(pair: ModelPair) -> None:
    for part, counts in per_part(pair).items():
        assert counts["waits"] <= (1 if "decode" in part else 2), (part, counts)
