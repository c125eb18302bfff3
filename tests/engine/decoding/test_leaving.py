"""A drafted answer that fails just as it leaves for the batch ends alone."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_specprefill import Engine, EngineConfig, Failed, Finished, GenerationRequest, TokenEvent
from mlx_specprefill.config import SpecPrefillPolicy, SpeculationConfig
from mlx_specprefill.engine.decoding import answers
from mlx_specprefill.errors import InvalidRequestError
from tests.support.tiny import random_prompt, tiny_pair


class TooComplex:
    """A grammar whose next mask can't be made."""

    def accept(self, token: int) -> None: ...

    def mask(self, size: int) -> Any:
        raise InvalidRequestError("the grammar has become too complex", field="response_format")


def test_its_neighbour_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    step = answers.Rows._step_drafted

    def failing(rows: Any) -> Iterator[Any]:
        for drafted in rows._drafted.values():
            if len(rows) > 1:
                drafted.active.grammar = TooComplex()
        yield from step(rows)

    monkeypatch.setattr(answers.Rows, "_step_drafted", failing)
    policy = SpecPrefillPolicy(enabled=False, densify=False)
    config = EngineConfig(policy=policy, speculation=SpeculationConfig(strategy="ngram"))
    first, second = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
    with Engine(tiny_pair(), config) as engine:
        engine.submit(GenerationRequest(random_prompt(20, 1), 400), first.put)
        until(first, TokenEvent)
        engine.submit(GenerationRequest(random_prompt(20, 2), 30), second.put)
        assert isinstance(until(first, Finished, Failed), Failed)
        assert isinstance(until(second, Finished, Failed), Finished)


def until(events: queue.SimpleQueue[Any], *kinds: type) -> Any:
    while not isinstance(event := events.get(timeout=60), kinds):
        pass
    return event
