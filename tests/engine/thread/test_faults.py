"""Faults beside a request's prefill: its own answer ends with the error, the others and the loop go on."""

from __future__ import annotations

import queue
from fractions import Fraction
from typing import Any

import mlx.core as mx
import pytest

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Failed,
    Finished,
    GenerationRequest,
    SpecPrefillPolicy,
    TokenEvent,
)
from mlx_specprefill.engine.decoding import answers
from mlx_specprefill.engine.decoding.decode_batch import DecodeBatch
from tests.support.tiny import random_prompt, tiny_pair
from tests.support.waiting import eventually

CONFIG = EngineConfig(
    policy=SpecPrefillPolicy(threshold=150, keep_pct=Fraction(3, 10)),
    prefill_step=128,
)


class Injected(Exception):  # noqa: N818
    """A fault of this test's own making."""


def frees(engine: Engine) -> bool:
    """Return whether nothing is reserved any more, once the draft has read what it reads in idle time."""
    return eventually(lambda: engine.memory.reserved == 0)


def test_a_first_choice_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that raises on the prompt's own logits, before the row is in the batch."""
    request = GenerationRequest(random_prompt(30), 3)

    def failing(_: Any) -> list[Any]:
        def process(history: mx.array, logits: mx.array) -> mx.array:
            raise Injected("processor")

        return [process]

    with Engine(tiny_pair(), CONFIG) as engine:
        expected = [event for event in engine.generate(request) if isinstance(event, TokenEvent)]
        with monkeypatch.context() as patch:
            patch.setattr(answers, "processors_of", failing)
            last = list(engine.generate(request))[-1]
        assert isinstance(last, Failed)
        assert isinstance(last.error, Injected)
        assert [event for event in engine.generate(request) if isinstance(event, TokenEvent)] == expected


def test_a_first_token_that_cannot_be_read_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another row goes on to its last token, and no row is left behind."""
    request, read = GenerationRequest(random_prompt(30), 3), DecodeBatch.first_token
    long, events = GenerationRequest(random_prompt(20, 1), 200), queue.SimpleQueue[Any]()
    with Engine(tiny_pair(), CONFIG) as engine:
        engine.submit(long, events.put)
        while not isinstance(events.get(timeout=60), TokenEvent):
            pass

        def failing(self: DecodeBatch) -> TokenEvent:
            read(self)
            raise Injected("first token")

        with monkeypatch.context() as patch:
            patch.setattr(DecodeBatch, "first_token", failing)
            last = list(engine.generate(request))[-1]
        assert isinstance(last, Failed)
        assert isinstance(last.error, Injected)
        while isinstance(ending := events.get(timeout=60), TokenEvent):
            pass
        assert isinstance(ending, Finished)
        assert ending.completion_tokens == 200
        assert frees(engine)


def test_a_fault_of_the_engine_itself_ends_what_runs_and_not_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    request = GenerationRequest(random_prompt(30), 3)
    with Engine(tiny_pair(), CONFIG) as engine:

        def broken(*_: Any) -> None:
            raise Injected("scheduler")

        with monkeypatch.context() as patch:
            patch.setattr(engine.scheduler, "record", broken)
            last = list(engine.generate(request))[-1]
        assert isinstance(last, Failed)
        assert isinstance(list(engine.generate(request))[-1], Finished)
        assert frees(engine)
