"""P8: whatever breaks in the optional stages, the request gets the full prefill's answer and says why."""

from __future__ import annotations

import gc
import weakref
from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest

from mlx_specprefill import (
    Engine,
    EngineConfig,
    GenerationRequest,
    PromptSpan,
    SamplingParams,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    TokenEvent,
)
from mlx_specprefill.adapters.capture import QueryCapture
from mlx_specprefill.adapters.rotation import PositionMappedRoPE
from mlx_specprefill.cache.positioned import PositionedKVCache
from mlx_specprefill.engine.prefixes import caches as caches_module
from mlx_specprefill.engine.reading import prefill as runner_module
from mlx_specprefill.engine.reading import scoring
from mlx_specprefill.engine.thread import loop as loop_module
from tests.support.tiny import FAMILIES, failed, generated, random_prompt, tiny_pair

M = 900
CONFIG = EngineConfig(policy=SpecPrefillPolicy(threshold=100), prefill_step=1024)


def request(enabled=True, **more):
    return GenerationRequest(
        random_prompt(M), 10, specprefill=SpecPrefillOptions(enabled, Fraction(3, 10), return_spans=True), **more
    )


def boom(*_args, **_kwargs):
    raise RuntimeError("injected")


def nan_rows(self, logits, sinks):
    self._best = mx.full((self.prompt_len,), float("nan"))


FAULTS = {
    "draft forward": ("draft", lambda patch, pair: patch.setattr(type(pair.draft), "__call__", _draft_fails(pair))),
    "capture": ("draft", lambda patch, pair: patch.setattr(QueryCapture, "observe", boom)),
    "scores not finite": ("draft", lambda patch, pair: patch.setattr(QueryCapture, "_add", nan_rows)),
    "selection": ("select", lambda patch, pair: patch.setattr(scoring, "select_part", boom)),
    "mapped rotation": ("prefill", lambda patch, pair: patch.setattr(PositionMappedRoPE, "__call__", _map_fails())),
    "placed cache": ("prefill", lambda patch, pair: patch.setattr(PositionedKVCache, "update_and_fetch", boom)),
    "empty cache": ("prefill", lambda patch, pair: patch.setattr(caches_module, "make_positioned_cache", boom)),
}


def _draft_fails(pair):
    """Target and draft may share a class: only the draft's instance breaks."""
    original = type(pair.draft).__call__

    def call(self, *args, **kwargs):
        if self is pair.draft:
            raise RuntimeError("injected")
        return original(self, *args, **kwargs)

    return call


def _map_fails():
    original = PositionMappedRoPE.__call__

    def call(self, x, dims, *args, offset=0, **kwargs):
        if isinstance(offset, mx.array) and offset.ndim == 2:
            raise RuntimeError("injected")
        return original(self, x, dims, *args, offset=offset, **kwargs)

    return call


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_gives_the_full_answer_and_leaves_nothing_behind(fault, monkeypatch):
    stage, inject = FAULTS[fault]
    pair = tiny_pair("llama", "llama")
    with Engine(pair, CONFIG) as engine:
        full, _ = generated(engine.generate(request(enabled=False)))
        sparse, before = generated(engine.generate(request()))
        with monkeypatch.context() as patch:
            inject(patch, pair)
            answer, last = generated(engine.generate(request()))
        again, after = generated(engine.generate(request()))
    assert answer == full
    assert last.report.mode == "full"
    assert last.report.reason.startswith(f"fallback: {stage} failed: ")
    assert last.report.kept_tokens == M
    assert last.report.kept_spans == ((0, M),)
    assert engine.prefiller.fallbacks == {stage: 1}
    assert again == sparse
    assert after.report.kept_spans == before.report.kept_spans
    assert after.report.mode == before.report.mode == "sparse"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_falls_back(family, monkeypatch):
    pair = tiny_pair(family, "llama")
    with Engine(pair, CONFIG) as engine:
        full, _ = generated(engine.generate(request(enabled=False)))
        monkeypatch.setattr(caches_module, "make_positioned_cache", boom)
        answer, last = generated(engine.generate(request()))
    assert (answer, last.report.mode) == (full, "full")


def test_a_fault_does_not_change_a_seeded_answer(monkeypatch):
    sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=11)
    with Engine(tiny_pair(), CONFIG) as engine:
        full, _ = generated(engine.generate(request(enabled=False, sampling=sampling)))
        monkeypatch.setattr(scoring, "select_part", boom)
        answer, _ = generated(engine.generate(request(sampling=sampling)))
    assert answer == full


def test_a_full_prefill_that_fails_fails_alone(monkeypatch):
    pair = tiny_pair()
    with Engine(pair, CONFIG) as engine:
        expected, _ = generated(engine.generate(request()))
        with monkeypatch.context() as patch:
            patch.setattr(runner_module, "feed", boom)
            events = list(engine.generate(request()))
        assert not any(isinstance(event, TokenEvent) for event in events)
        assert "injected" in str(failed(events).error)
        assert generated(engine.generate(request()))[0] == expected


def test_a_failure_keeps_nothing_of_the_prefill_alive(monkeypatch):
    """An error holds the frames that it went through, and those hold caches, as long as somebody holds the event."""
    held = []

    def fails(*_, **__):
        cache = np.zeros(1)
        held.append(weakref.ref(cache))
        try:
            raise ValueError("the cause")
        except ValueError as error:
            raise RuntimeError("injected") from error

    monkeypatch.setattr(runner_module, "feed", fails)
    monkeypatch.setattr(loop_module.log, "disabled", True)  # the test runner keeps records with their frames
    with Engine(tiny_pair(), CONFIG) as engine:
        last = failed(engine.generate(request(enabled=False)))
    gc.collect()
    assert isinstance(last.error, RuntimeError)
    assert isinstance(last.error.__cause__, ValueError)
    assert [ref() for ref in held] == [None]


def test_without_a_tail_the_first_token_comes_from_the_wrong_place(monkeypatch):
    """The forced tail holds the last prompt token; nothing else promises that it is kept."""
    spans = (PromptSpan("user", 0, 3, M - 6, M - 4),)
    with Engine(tiny_pair(), CONFIG) as engine:
        _, last = generated(engine.generate(request(spans=spans)))
        kept = [i for start, end in last.report.kept_spans for i in range(start, end)]
        assert set(range(M - 6, M)) <= set(kept)
        assert np.isclose(last.report.kept_share, len(kept) / M, atol=1e-6)
