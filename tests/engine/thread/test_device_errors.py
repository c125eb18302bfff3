"""The device runs out of memory, gives up a forward, or takes no more work, wherever the engine is at that moment.

MLX hands on Metal's words in RuntimeErrors. Here a model's forward raises them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import mlx.core as mx
import pytest

from mlx_specprefill import (
    DeviceError,
    Engine,
    EngineClosedError,
    EngineConfig,
    Failed,
    GenerationRequest,
    SpecPrefillOptions,
    SpecPrefillPolicy,
)
from mlx_specprefill.cache.prefix.tree import PrefixCache
from mlx_specprefill.errors import device_error
from tests.support import tiny
from tests.support.tiny import generated, random_prompt, tiny_pair
from tests.support.waiting import eventually

SAID = "[METAL] Command buffer execution failed: "
MEMORY = f"{SAID}Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
TIMEOUT = f"{SAID}Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)"
HURRY = f"{SAID}Impacting Interactivity (0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)"
REFUSED = (
    f"{SAID}Ignored (for causing prior/excessive GPU errors) "
    "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)"
)
OTHER = f"{SAID}Innocent Victim"
STEP = 128
POLICY = SpecPrefillPolicy(threshold=100, keep_pct=Fraction(3, 10), densify=False)
Fails = Callable[[int], bool]  # a forward of so many tokens


class Models:
    """The forwards of a pair of unlike models, by model; any of them can be made to fail."""

    def __init__(self, pair: Any, patch: pytest.MonkeyPatch) -> None:
        self.forwards: list[tuple[str, int]] = []
        self.broken: dict[str, tuple[str, Fails]] = {}
        for name in ("target", "draft"):
            self._watch(name, type(getattr(pair, name)), patch)

    def _watch(self, name: str, kind: Any, patch: pytest.MonkeyPatch) -> None:
        forward = kind.__call__

        def call(model: Any, tokens: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            self.forwards.append((name, tokens.shape[1]))
            message, fails = self.broken.get(name, ("", lambda _: False))
            if fails(tokens.shape[1]):
                raise RuntimeError(message)
            result: mx.array = forward(model, tokens, *args, **kwargs)
            return result

        patch.setattr(kind, "__call__", call)

    def longest(self, name: str) -> int:
        return max(count for whose, count in self.forwards if whose == name)


@pytest.fixture
def engine() -> Iterator[Engine]:
    config = EngineConfig(policy=POLICY, prefill_step=STEP, memory_limit=1 << 30)
    with Engine(tiny_pair("llama", "qwen3"), config) as running:
        list(running.generate(asked(False, seed=1)))  # something is cached
        yield running


@pytest.fixture
def models(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Models:
    return Models(engine.pair, monkeypatch)


def asked(sparse: bool, seed: int = 0, speculative: Any = None) -> GenerationRequest:
    how = SpecPrefillOptions(sparse, speculative=speculative)
    return GenerationRequest(random_prompt(900, seed), 6, specprefill=how)


def failed(engine: Engine, request: GenerationRequest) -> DeviceError:
    error = tiny.failed(engine.generate(request)).error
    assert isinstance(error, DeviceError)
    return error


WHERE: dict[str, tuple[bool, str, Fails]] = {
    "draft": (True, "draft", lambda tokens: tokens > 1),
    "look-ahead": (True, "draft", lambda tokens: tokens == 1),
    "sparse prefill": (True, "target", lambda tokens: tokens > 1),
    "full prefill": (False, "target", lambda tokens: tokens > 1),
    "decode": (False, "target", lambda tokens: tokens == 1),
}


@pytest.mark.extended
@pytest.mark.parametrize("where", WHERE)
def test_out_of_memory_fails_the_request_and_makes_room_for_the_next(
    engine: Engine, models: Models, where: str
) -> None:
    """Nothing is read in full instead, which would need several times as much."""
    sparse, name, fails = WHERE[where]
    limit, free = engine.memory.limit, (1 << 30) - engine.memory.weights
    assert engine.caches.nbytes > 0
    models.broken[name] = MEMORY, fails
    request = (
        asked(sparse)
        if where != "look-ahead"
        else GenerationRequest(random_prompt(900), 6, specprefill=SpecPrefillOptions(True, rule="paper"))
    )
    error = failed(engine, request)
    assert "Insufficient Memory" in str(error)
    assert "--memory-limit" in str(error)
    assert [name for name, tokens in models.forwards if fails(tokens)].count(name) == 1
    if where != "decode":
        assert models.forwards[-1][0] == name
    assert eventually(lambda: engine.caches.nbytes == 0)
    assert limit is not None
    assert engine.memory.limit == limit - free // 5
    assert not engine.stats().fallbacks
    models.broken.clear()
    _, last = generated(engine.generate(asked(sparse)))
    assert last.report.mode == ("sparse" if sparse else "full")


@pytest.mark.parametrize("message", [TIMEOUT, HURRY])
def test_a_forward_that_took_too_long_makes_later_ones_half_as_long(
    engine: Engine, models: Models, message: str
) -> None:
    list(engine.generate(asked(False, seed=2)))
    assert models.longest("target") == STEP
    models.broken["target"] = message, lambda tokens: tokens > STEP // 2
    assert f"{STEP // 2} tokens at a time" in str(failed(engine, asked(False)))
    models.forwards.clear()
    generated(engine.generate(asked(False)))
    assert models.longest("target") == STEP // 2


def test_a_proposal_that_fails_so_ends_its_row(engine: Engine, models: Models) -> None:
    """Its cache can't be trusted, and the device is not well."""
    list(engine.generate(asked(False, seed=3, speculative="draft")))
    models.broken["draft"] = MEMORY, lambda tokens: tokens == 1
    failed(engine, asked(False, speculative="draft"))


def test_a_device_that_takes_no_more_work_is_given_up(engine: Engine, models: Models) -> None:
    models.broken["target"] = REFUSED, lambda _: True
    error = failed(engine, asked(False))
    assert "started again" in str(error)
    assert engine.health().alive
    assert engine.health().lost == str(error)
    models.broken.clear()
    with pytest.raises(EngineClosedError, match="started again"):
        engine.submit(asked(False), lambda _: None)


def test_others_that_wait_are_told_as_well(engine: Engine, models: Models) -> None:
    submitted = threading.Event()
    models.broken["target"] = REFUSED, lambda _: submitted.wait(60)
    ends: list[Any] = []
    for seed in range(3):
        engine.submit(asked(False, seed), ends.append)
    submitted.set()
    assert eventually(lambda: sum(isinstance(event, Failed) for event in ends) == 3)
    assert all(isinstance(event.error, DeviceError) for event in ends if isinstance(event, Failed))


@pytest.mark.parametrize("message", [MEMORY, TIMEOUT, OTHER])
def test_three_in_a_row_are_too_many(engine: Engine, models: Models, message: str) -> None:
    for answered in (True, False):
        for seed in (0, 1):
            models.broken["target"] = message, lambda _: True
            failed(engine, asked(False, seed))
            assert engine.health().lost is None
        if answered:
            models.broken.clear()
            list(engine.generate(asked(False)))
    failed(engine, asked(False))
    assert engine.health().lost is not None


def test_rows_that_fail_together_fail_once(engine: Engine, models: Models) -> None:
    """Four answers of one batch meet one error."""
    ends: list[Any] = []
    for seed in range(4):
        request = GenerationRequest(random_prompt(100, seed), 400, specprefill=SpecPrefillOptions(False))
        engine.submit(request, ends.append)
    assert eventually(lambda: len(engine.scheduler.decoding) == 4)
    models.broken["target"] = MEMORY, lambda _: True
    assert eventually(lambda: sum(isinstance(event, Failed) for event in ends) == 4)
    assert engine.health().lost is None


def test_a_prefix_that_can_not_be_kept_costs_no_answer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError(MEMORY)

    with monkeypatch.context() as patch:
        patch.setattr(PrefixCache, "store", full)
        generated(engine.generate(asked(False)))
    assert eventually(lambda: engine.caches.nbytes == 0)
    limit = engine.memory.limit
    assert limit is not None
    assert limit < 1 << 30


def test_other_errors_are_none_of_the_devices() -> None:
    kinds = {MEMORY: "memory", TIMEOUT: "timeout", HURRY: "timeout", REFUSED: "refused", OTHER: "other"}
    kinds["[malloc] Unable to allocate 68719476736 bytes."] = "memory"
    kinds["[metal::malloc] Resource limit (499000) exceeded."] = "memory"
    assert {text: device_error(RuntimeError(text)) for text in kinds} == kinds
    assert device_error(RuntimeError("[matmul] shapes differ")) is None
    assert device_error(ValueError(MEMORY)) is None
