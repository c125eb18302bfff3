"""Requests that come at once read what their prompts have in common once, whoever of them comes first."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest

from mlx_specprefill import (
    CacheLabel,
    Engine,
    EngineConfig,
    Event,
    Finished,
    GenerationRequest,
    Progress,
    PromptSpan,
    RequestHandle,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    TokenEvent,
)
from tests.support.tiny import random_prompt, tiny_pair

STEP = 64
POLICY = SpecPrefillPolicy(threshold=200, keep_pct=Fraction(1, 5), densify=False)
CONFIG = EngineConfig(policy=POLICY, prefill_step=STEP, prefix_cache_bytes=64 << 20)
SYSTEM, TASKS = 1000, [random_prompt(2 * STEP * size, seed=size) for size in range(6, 0, -1)]  # each sooner read
OFF = SpecPrefillOptions(enabled=False)


def request(own: Sequence[int], system: int = SYSTEM, owner: str = "", **more: object) -> GenerationRequest:
    prompt = (*random_prompt(system, seed=99), *own)
    spans = PromptSpan("system", 0, 0, system, system), PromptSpan("user", system, system, len(prompt), len(prompt))
    made = GenerationRequest(prompt, 2, specprefill=OFF, spans=spans, label=CacheLabel(owner))
    return replace(made, **more)


def storm(engine: Engine, requests: Sequence[GenerationRequest], gone: int = 0) -> list[tuple[int, int]]:
    """Send a request with each chunk that is read. The number of each and its tokens that were read, as they ended.

    Args:
        gone: of the first requests, those whose client leaves once all have come.
    """
    left, ended = list(enumerate(requests)), queue.SimpleQueue[tuple[int, int]]()
    handles = list[RequestHandle]()

    def send() -> None:
        number, sent = left.pop(0)

        def note(event: Event) -> None:
            if left and (isinstance(event, TokenEvent) or (isinstance(event, Progress) and event.stage != "queued")):
                send()
                if not left:
                    for handle in handles[:gone]:
                        handle.cancel()
            elif isinstance(event, Finished):
                report = event.report
                ended.put((number, 0 if number < gone else report.prompt_tokens - report.cached_tokens))

        handles.append(engine.submit(sent, note))

    send()
    return [ended.get(timeout=60) for _ in requests]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_common_system_prompt_is_read_once(family: str, sparse: bool) -> None:
    options = SpecPrefillOptions() if sparse else OFF
    with Engine(tiny_pair(family), CONFIG) as engine:
        read = storm(engine, [request(task, specprefill=options) for task in TASKS])
    assert sum(tokens for _, tokens in read) <= SYSTEM + sum(map(len, TASKS))


@pytest.mark.parametrize("options", [OFF, SpecPrefillOptions(), SpecPrefillOptions(enabled=True)])
def test_the_prompt_of_several_answers_is_read_once(options: SpecPrefillOptions) -> None:
    with Engine(tiny_pair("llama"), CONFIG) as engine:
        read = dict(storm(engine, [request(TASKS[0], specprefill=options)] * 4))
    assert [read[number] for number in (1, 2, 3)] == [len(TASKS[0]) if options.enabled else 1] * 3


def test_another_reads_it_where_the_first_is_given_up() -> None:
    with Engine(tiny_pair("llama"), CONFIG) as engine:
        read = storm(engine, [request(task) for task in TASKS], gone=1)
    assert sum(tokens for _, tokens in read) <= SYSTEM + sum(map(len, TASKS[1:]))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (request(random_prompt(2 * SYSTEM)), request(TASKS[0])),  # has much to read beside what is common
        (request(TASKS[0], owner="one"), request(TASKS[-1], owner="other")),
        (request(TASKS[0], system=200), request(TASKS[-1], system=200)),
        (request(TASKS[0]), request(TASKS[-1], prompt_logprobs=0)),
        (request(TASKS[0], prompt_logprobs=0), request(TASKS[-1])),
        (request(TASKS[0], specprefill=SpecPrefillOptions(enabled=True), spans=()), request(TASKS[-1], spans=())),
    ],
)
def test_a_request_does_not_wait_for_what_it_would_not_use(first: GenerationRequest, second: GenerationRequest) -> None:
    with Engine(tiny_pair("llama"), CONFIG) as engine:
        (number, read), _ = storm(engine, [first, second])
    assert (number, read) == (1, len(second.prompt))
