"""Memory of a sparse request while its target reads: the draft's cache is gone, unless somebody needs it."""

from __future__ import annotations

import gc
import platform
import time
import weakref
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_specprefill import (
    ContextLengthError,
    Engine,
    EngineConfig,
    Finished,
    GenerationRequest,
    SettingsError,
    SpecPrefillOptions,
    SpecPrefillPolicy,
)
from mlx_specprefill.cache.feeding import feed as read
from mlx_specprefill.cache.positioned import leaves
from mlx_specprefill.engine.prefixes import lookup
from mlx_specprefill.engine.reading import prefill as prefiller
from mlx_specprefill.engine.reading import scoring
from mlx_specprefill.engine.thread import loop
from mlx_specprefill.selection.scorer import scorer_for
from tests.support import tiny


@pytest.mark.parametrize("wired", ["off", "on"])
def test_memory_is_wired_only_where_that_is_asked_for(monkeypatch, wired):
    """Kernel panics were reported of Macs on which the limit is set, so neither we nor what we call sets it."""
    monkeypatch.setattr(platform, "mac_ver", lambda: ("15.0", ("", "", ""), ""))
    limits, info = [], mx.device_info()
    monkeypatch.setattr(mx, "set_wired_limit", lambda limit: limits.append(limit) or 0)
    monkeypatch.setattr(mx, "device_info", lambda: {**info, "max_recommended_working_set_size": 1 << 33})
    config = EngineConfig(wired_limit=wired)
    with Engine(tiny.tiny_pair(), config) as engine:
        for enabled in (True, False):
            request = GenerationRequest(
                tuple(tiny.random_prompt(300)), 4, specprefill=SpecPrefillOptions(enabled, speculative="draft")
            )
            *_, last = engine.generate(request)
            assert isinstance(last, Finished)
    assert limits == ([1 << 33] if wired == "on" else [])


class Watch:
    """Weak references to what the draft left behind, and how many of them live when the target starts to read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: list[weakref.ref[Any]] = []
        self.alive: list[int] = []

        def watched_scorer(*args: Any) -> Any:
            scorer = scorer_for(*args)

            def score(draft: Any, task: Any) -> Iterator[Any]:
                scores = yield from scorer.score(draft, task)
                self.left += [weakref.ref(part) for part in leaves(scores.cache)] + [weakref.ref(scores.importance)]
                return scores

            return SimpleNamespace(score=score)

        def watched_read(*args: Any, **kwargs: Any) -> Iterator[Any]:
            gc.collect()
            self.alive.append(sum(left() is not None for left in self.left))
            return (yield from read(*args, **kwargs))

        monkeypatch.setattr(scoring, "scorer_for", watched_scorer)
        monkeypatch.setattr(prefiller, "feed", watched_read)


@pytest.mark.parametrize(("speculative", "held"), [("off", False), ("draft", True)])
def test_the_drafts_cache_and_scores_are_gone_before_the_target_reads(monkeypatch, speculative, held):
    watch = Watch(monkeypatch)
    sparse = SpecPrefillOptions(enabled=True, speculative=speculative)
    request = GenerationRequest(tuple(tiny.random_prompt(300)), 4, specprefill=sparse)
    with Engine(tiny.tiny_pair(), EngineConfig(prefix_cache_bytes=0)) as engine:
        *_, last = engine.generate(request)
    assert isinstance(last, Finished)
    assert last.report.mode == "sparse"
    assert len(watch.left) > 1
    assert (watch.alive[0] > 0) == held


def test_a_limit_below_the_weights_is_refused_with_what_is_needed():
    pair = tiny.tiny_pair()
    with pytest.raises(
        SettingsError, match=r"0\.0 MiB is below the weights: target \d+\.\d MiB, draft \d+\.\d MiB\. At least"
    ):
        Engine(pair, EngineConfig(memory_limit=1000))


def leave_room(engine: Engine, tokens: int) -> None:
    """As much memory as one full prefill of that many tokens needs."""
    memory = engine.memory
    need = memory.need(GenerationRequest(tuple(range(1, tokens)), 1), "full").total
    memory.limit = memory.weights + need


def test_the_window_is_what_memory_leaves_room_for() -> None:
    pair = tiny.tiny_pair()
    full = SpecPrefillOptions(enabled=False)
    with Engine(pair, EngineConfig(prefix_cache_bytes=0)) as engine:
        assert engine.window == pair.context_length
        leave_room(engine, 300)
        assert engine.window == 300 < pair.context_length
        *_, last = engine.generate(GenerationRequest(tuple(tiny.random_prompt(296)), 4, specprefill=full))
        assert isinstance(last, Finished)
        with pytest.raises(ContextLengthError) as caught:
            engine.check(GenerationRequest(tuple(tiny.random_prompt(297)), 4, specprefill=full))
        assert (caught.value.context_length, caught.value.total_tokens) == (300, 301)


@pytest.mark.parametrize("sparse", [None, True, False])
def test_a_long_prompt_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch, sparse: bool | None) -> None:
    """256K tokens fit into the model's window, not into memory: the refusal says how many do. Nothing is queued."""
    pair, tokens = tiny.tiny_pair(context=1 << 19), 1 << 18
    request = GenerationRequest(tiny.random_prompt(tokens), 4, specprefill=SpecPrefillOptions(enabled=sparse))
    with Engine(pair, EngineConfig(prefix_cache_bytes=0)) as engine:
        assert engine.window == 1 << 19
        leave_room(engine, 1000)
        with monkeypatch.context() as patch:
            for module, name in ((prefiller, "feed"), (lookup, "empty_cache"), (scoring, "scorer_for")):
                patch.setattr(module, name, lambda *_: pytest.fail("a model was asked to read"))
            patch.setattr(engine._inbox, "post", lambda _: pytest.fail("it was queued"))
            mx.reset_peak_memory()
            for ask in (engine.check, lambda one: engine.submit(one, lambda _: None)):
                with pytest.raises(ContextLengthError, match=f"is 1000 tokens.*requested {tokens + 4} tokens"):
                    ask(request)
            assert mx.get_peak_memory() == 0  # no array was made since it was reset
        assert engine.memory.reserved == 0
        *_, last = engine.generate(GenerationRequest(tiny.random_prompt(300), 4))
    assert isinstance(last, Finished)


def test_a_prompt_that_fits_in_full_only_is_read_in_full() -> None:
    pair = tiny.tiny_pair()
    with Engine(pair, EngineConfig(prefix_cache_bytes=0)) as engine:
        leave_room(engine, 300)
        request = GenerationRequest(tuple(tiny.random_prompt(290)), 4, specprefill=SpecPrefillOptions(enabled=True))
        *_, last = engine.generate(request)
    assert isinstance(last, Finished)
    assert (last.report.mode, last.report.reason) == ("full", "a sparse prefill needs more memory than there is")


@pytest.mark.parametrize(
    ("limit", "asked", "least", "most"),
    [
        (100 << 30, None, 24 << 30, 25 << 30),  # a quarter of what weights and one long request leave
        (4 << 30, None, 2 << 30, 2 << 30),
        (100 << 30, 64 << 20, 64 << 20, 64 << 20),
    ],
)
def test_prefixes_have_a_part_of_what_one_request_leaves(limit: int, asked: int | None, least: int, most: int) -> None:
    with Engine(tiny.tiny_pair(), EngineConfig(memory_limit=limit, prefix_cache_bytes=asked)) as engine:
        assert least <= engine.caches.budget.most <= most


def test_freed_memory_is_given_back_after_twenty_idle_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after one: an agent's next turn would allocate it anew. By a clock that the test moves."""
    emptied: list[float] = []
    with Engine(tiny.tiny_pair(), EngineConfig(policy=SpecPrefillPolicy(densify=False))) as engine:
        tiny.generated(engine.generate(GenerationRequest(tiny.random_prompt(20), 2)))
        engine.cached()
        ended = engine.loop._last_end
        clock = SimpleNamespace(monotonic=time.monotonic)
        monkeypatch.setattr(mx, "clear_cache", lambda: emptied.append(clock.monotonic()))
        for now in (ended + 2, ended + 19, ended + 21, ended + 40):
            clock = SimpleNamespace(monotonic=partial(float, now), perf_counter=time.perf_counter)
            monkeypatch.setattr(loop, "time", clock)
            engine.loop._next_look = 0.0
            engine.loop._look_at_memory()
        assert emptied == [ended + 21]


@pytest.mark.parametrize(("spare", "step"), [(1.1, 2048), (0.7, 1024), (0.4, 512), (0.0, 128)])
def test_forwards_are_halved_until_one_long_request_fits(spare: float, step: int) -> None:
    """Forwards of 2048 tokens leave less room for the cache than the model's window of 4096 tokens takes.

    Args:
        spare: memory beside that request's cache, as a part of what forwards of 2048 tokens need.
    """
    pair = tiny.tiny_pair()
    with Engine(pair, EngineConfig(prefill_step=2048, memory_limit=1 << 34)) as engine:
        memory = engine.memory
        whole = memory.need(GenerationRequest(tiny.random_prompt(4096 - 8), 8), "full")
        limit = memory.weights + whole.held + int(spare * whole.working)
    with Engine(pair, EngineConfig(prefill_step=2048, memory_limit=limit)) as engine:
        assert engine.prefiller.planner._chunks.largest == engine.memory.step == step
        assert engine.window == pair.context_length or step == 128
