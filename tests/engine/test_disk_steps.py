"""Running answers go on while prefixes are read from disk and copied for it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Event,
    Finished,
    GenerationRequest,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    TokenEvent,
)
from mlx_specprefill.cache.budget import ByteBudget
from mlx_specprefill.cache.prefix import disk, disk_policy, record_file
from mlx_specprefill.cache.prefix.disk import DiskTier
from mlx_specprefill.cache.prefix.disk_policy import StoredPrefixCache
from tests.cache.prefix.stores import BLOCK, fake_caches, filled, same
from tests.support.tiny import generated, random_prompt, tiny_pair
from tests.support.waiting import eventually

LONG = random_prompt(1100)  # four blocks and a tail
OFF = SpecPrefillOptions(False)
LARGE = 1 << 30


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    policy = SpecPrefillPolicy(enabled=False, densify=False)
    return EngineConfig(policy=policy, prefill_step=256, prefix_cache_bytes=64 << 20, prefix_cache_dir=tmp_path)


class Running:
    """An answer that goes on for as long as it is wanted."""

    def __init__(self, engine: Engine) -> None:
        self.tokens = 0
        self.ended = threading.Event()
        self._handle = engine.submit(GenerationRequest(random_prompt(20, 5), 3000, specprefill=OFF), self._on_event)
        assert eventually(lambda: self.tokens > 0)

    def _on_event(self, event: Event) -> None:
        self.tokens += isinstance(event, TokenEvent)
        if isinstance(event, Finished):
            self.ended.set()

    def end(self) -> None:
        self._handle.cancel()
        assert self.ended.wait(60)


def test_each_record_is_copied_between_two_tokens(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_policy, "_PIECE", 1)  # one record at once
    seen: list[int] = []
    with Engine(tiny_pair(), config) as engine:
        running = Running(engine)
        write = DiskTier.write
        monkeypatch.setattr(DiskTier, "write", lambda *given: (seen.append(running.tokens), write(*given))[1])
        generated(engine.generate(GenerationRequest(LONG, 1, specprefill=OFF)))
        assert eventually(lambda: not engine.caches.has_unsaved)
        counts = list(seen)
        running.end()
    assert len(counts) >= 5
    assert len(set(counts)) == len(counts)


@pytest.mark.extended
@pytest.mark.parametrize("end", ["read", "cancelled", "forgotten", "corrupt"])
def test_a_slow_disk_holds_up_nobody_else(
    end: str, config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five more tokens of the running answer come while a record can't be read; then the long prompt goes on."""
    asked = GenerationRequest((*LONG, 7, 8), 3, specprefill=OFF)
    with Engine(tiny_pair(), replace(config, prefix_cache_dir=None)) as engine:
        expected, _ = generated(engine.generate(asked))
    with Engine(tiny_pair(), config) as engine:
        generated(engine.generate(GenerationRequest(LONG, 1, specprefill=OFF)))
    reached, go, check = threading.Event(), threading.Event(), record_file.check

    def slow(*given: Any) -> None:
        reached.set()
        assert go.wait(60)
        if end == "corrupt":
            raise ValueError
        check(*given)

    with Engine(tiny_pair(), config) as engine:
        running = Running(engine)
        monkeypatch.setattr(disk, "check", slow)
        tokens, last, over = list[int](), list[Finished](), threading.Event()

        def on_event(event: Event) -> None:
            if isinstance(event, TokenEvent):
                tokens.append(event.token)
            if isinstance(event, Finished):
                last.append(event)
                over.set()

        handle = engine.submit(asked, on_event)
        assert reached.wait(60)
        before = running.tokens
        assert eventually(lambda: running.tokens >= before + 5)
        if end == "forgotten":
            asking = threading.Thread(target=engine.drop_cached)
            asking.start()
            assert eventually(lambda: engine.cached() == ())
        if end == "cancelled":
            handle.cancel()
            assert over.wait(60)
        go.set()
        assert over.wait(60)
        running.end()
        assert last[0].reason == ("cancelled" if end == "cancelled" else "length")
        assert tokens == ([] if end == "cancelled" else expected)
        cached = last[0].report.cached_tokens
        assert cached == (len(LONG) if end == "read" else 0) or end == "forgotten"
        if end == "forgotten":
            asking.join(60)
            assert engine.cached() == ()
        monkeypatch.setattr(disk, "check", check)
        assert generated(engine.generate(asked))[0] == expected


def steps_of(prefixes: StoredPrefixCache, prompt: tuple[int, ...], chance: random.Random) -> Iterator[None]:
    """A look-up, whose result has to be right."""
    hit = yield from prefixes.restore(prompt)
    if hit is not None:
        assert same(hit.cache, filled(prefixes._layout._make, prompt[: hit.length]))


@pytest.mark.extended
@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_anything_may_happen_between_two_steps(
    stateful: bool, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Look-ups side by side, stores, evictions, losses on disk, and forgetting: every hit is right, and what is counted
    is there."""
    monkeypatch.setattr(disk_policy, "_PIECE", 1000)
    chance, make = random.Random(seed), fake_caches(stateful)
    tier = DiskTier(tmp_path, LARGE)
    budget = ByteBudget(20_000)
    prefixes = StoredPrefixCache(tier, False, "model", make, budget, block_size=BLOCK, later=True)
    prompts = [tuple(range(100 * one, 100 * one + chance.randint(20, 60))) for one in range(3)]
    prompts += [(*prompt[:20], *range(900, 920)) for prompt in prompts]
    running: list[Any] = []
    for _ in range(300):
        prompt = chance.choice(prompts)
        match chance.randrange(9):
            case 0 | 1:
                running.append(steps_of(prefixes, prompt, chance))
            case 2:
                length = chance.randint(1, len(prompt))
                prefixes.store(prompt[:length], filled(make, prompt[:length]))
            case 3:
                budget.shrink(chance.randint(0, 20_000))
            case 4:
                tier.flush()
                lost = sorted(tmp_path.rglob("*.safetensors"))
                if lost and chance.random() < 0.2:
                    chance.choice(lost).write_bytes(b"")
            case 5:
                if chance.random() < 0.2:
                    prefixes.clear()
                    assert tier.forget(None).result()
            case 6:
                prefixes.save_some()
            case _:
                for one in chance.sample(running, min(2, len(running))):
                    if next(one, running) is running:
                        running.remove(one)
        held = sum(record.nbytes for node in prefixes._nodes() for record in node.records() if record.held)
        assert held == budget.used <= 20_000
    for one in running:
        list(one)
    while prefixes.has_unsaved:
        prefixes.save_some()
    tier.close()
    tier = DiskTier(tmp_path, LARGE)
    prefixes = StoredPrefixCache(tier, False, "model", make, ByteBudget(LARGE), block_size=BLOCK)
    for prompt in prompts:
        list(steps_of(prefixes, prompt, chance))
    tier.close()
