"""Decoding rows hold no more than was reserved for them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mlx_specprefill import Engine, EngineConfig, Finished, GenerationRequest, SpecPrefillOptions, SpecPrefillPolicy
from mlx_specprefill.loading.footprint import cache_bytes
from tests.support.tiny import random_prompt, tiny_pair

OFF = SpecPrefillOptions(enabled=False)
CONFIG = EngineConfig(policy=SpecPrefillPolicy(enabled=False, densify=False), prefill_step=128, prefix_cache_bytes=0)


def request(seed: int, prompt: int, answer: int) -> GenerationRequest:
    return GenerationRequest(random_prompt(prompt, seed), answer, specprefill=OFF)


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt_oss", marks=pytest.mark.extended)])
def test_rows_take_no_more_than_is_reserved(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step of answers of random lengths, with room for four of the longest, growth included."""
    rng, seen = random.Random(3), list[tuple[int, int, int]]()
    requests = [request(seed, rng.choice([20, 40, 300, 900]), rng.randint(5, 80)) for seed in range(16)]
    pair = tiny_pair(family)
    with Engine(pair, CONFIG) as engine:
        memory = engine.memory
        memory.limit = memory.weights + 4 * memory.need(request(0, 900, 80), "full").total
        batch, step = engine.rows._batch, engine.rows.step

        def watched() -> Iterator[Any]:
            yield from step()
            own = sum(memory._reserved[uid].held for uid in batch.uids)
            held = sum(map(cache_bytes, batch.caches))
            seen.append((held, own, memory.reserved + memory.weights))

        monkeypatch.setattr(engine.rows, "step", watched)
        with ThreadPoolExecutor(len(requests)) as pool:
            ends = list(pool.map(lambda one: [*engine.generate(one)][-1], requests))
        assert all(isinstance(end, Finished) for end in ends)
        assert [use for use in seen if use[0] > use[1]] == []
        assert max(use[2] for use in seen) <= memory.limit
        assert memory.reserved == 0
