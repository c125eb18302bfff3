"""The numbers for dashboards, held against what the engine did."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlx_specprefill import Engine, EngineConfig, EngineStats, Event, GenerationRequest, ModelPair, TokenEvent
from mlx_specprefill.config import SpecPrefillPolicy
from mlx_specprefill.request import SpecPrefillOptions
from tests.support import precision
from tests.support.tiny import random_prompt, tiny_pair
from tests.support.waiting import eventually

SPARSE = SpecPrefillOptions(enabled=True)


def nbytes(model: nn.Module) -> int:
    return sum(array.nbytes for _, array in nn.utils.tree_flatten(model.parameters()))


def engine_of(pair: ModelPair, **config: Any) -> Engine:
    return Engine(pair, EngineConfig(policy=SpecPrefillPolicy(threshold=0, densify=False), **config))


def finish(engine: Engine, request: GenerationRequest) -> None:
    list(engine.generate(request))


def test_an_idle_engine_holds_its_weights() -> None:
    pair = tiny_pair()
    with engine_of(pair, memory_limit=1 << 30) as engine:
        stats = engine.stats()
    assert pair.draft is not None
    assert (stats.waiting, stats.prefilling, stats.decoding) == (0, 0, 0)
    assert stats.memory.target_weights == nbytes(pair.target)
    assert stats.memory.draft_weights == nbytes(pair.draft)
    assert stats.memory.active >= stats.memory.target_weights + stats.memory.draft_weights
    assert (stats.memory.requests, stats.memory.prefix_cache) == (0, 0)
    assert stats.memory.limit == 1 << 30


def test_a_running_request_is_counted_with_its_cache() -> None:
    with engine_of(tiny_pair()) as engine:
        seen: list[EngineStats] = []
        looked = threading.Event()

        def look(event: Event) -> None:
            if isinstance(event, TokenEvent):
                seen.append(engine.stats())
                looked.set()

        prompt = random_prompt(64)
        handle = engine.submit(GenerationRequest(prompt, 8, specprefill=SpecPrefillOptions(enabled=False)), look)
        assert looked.wait(60)
        handle.cancel()
        per_token = 2 * 3 * 2 * 12 * precision.dtype().size  # keys and values, layers, heads, their size
        assert (seen[0].decoding, seen[0].prefilling) == (1, 0)
        assert seen[0].memory.requests == per_token * (64 + 1)
        assert seen[0].memory.reserved > seen[0].memory.requests
        assert eventually(lambda: engine.stats().memory.requests == 0 == engine.stats().decoding)


def test_prefixes_are_counted() -> None:
    with engine_of(tiny_pair()) as engine:
        prompt = random_prompt(600)
        finish(engine, GenerationRequest(prompt, 1, specprefill=SpecPrefillOptions(enabled=False)))
        assert (engine.stats().prefix_hits, engine.stats().prefix_misses) == (0, 1)
        finish(engine, GenerationRequest(prompt, 1, specprefill=SpecPrefillOptions(enabled=False)))
        stats = engine.stats()
        assert (stats.prefix_hits, stats.prefix_misses, stats.prefix_tokens) == (1, 1, 599)
        assert stats.memory.prefix_cache > 0
        finish(engine, GenerationRequest(random_prompt(600, seed=1), 1, specprefill=SPARSE))
        assert eventually(lambda: any(entry.kind == "session" for entry in engine.cached()))
        assert engine.stats().memory.prefix_cache > stats.memory.prefix_cache


def test_a_fallback_is_counted_by_its_stage() -> None:
    pair = tiny_pair()
    with engine_of(pair) as engine:
        engine.caches.draft_prefix = None
        finish(engine, GenerationRequest(random_prompt(600), 1, specprefill=SPARSE))
        assert engine.stats().fallbacks == {"draft": 1}


def test_densified_tokens_are_counted() -> None:
    with Engine(tiny_pair(), EngineConfig(policy=SpecPrefillPolicy(threshold=0))) as engine:
        finish(engine, GenerationRequest(random_prompt(600), 2, specprefill=SPARSE))
        assert eventually(lambda: engine.stats().densified == 1)
        assert engine.stats().densified_tokens == 602


def test_what_lies_on_disk_is_counted(tmp_path: Path) -> None:
    with engine_of(tiny_pair(), prefix_cache_dir=tmp_path) as engine:
        finish(engine, GenerationRequest(random_prompt(600), 1, specprefill=SpecPrefillOptions(enabled=False)))
        assert eventually(lambda: engine.stats().memory.prefix_disk == _file_bytes(tmp_path) > 0)


def _file_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
