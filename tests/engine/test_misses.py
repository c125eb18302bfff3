"""A request that reads again what the cache holds says why, and only such a request looks for a reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from mlx_specprefill import CacheLabel, Engine, EngineConfig, GenerationRequest, PrefillReport, PromptSpan
from mlx_specprefill.engine.misses import explain_miss
from tests.support.tiny import generated, random_prompt, tiny_pair

PROMPT = random_prompt(2600)
PLACE = 700
CHANGED = (*PROMPT[:PLACE], (PROMPT[PLACE] + 1) % 50, *PROMPT[PLACE + 1 :])
SPANS = (PromptSpan("system", 0, 4, 596, 600), PromptSpan("user", 600, 604, 2590, 2600))
KEY = CacheLabel("alice")


@pytest.fixture(params=["llama", "qwen3_5"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(tiny_pair(request.param), EngineConfig(prefix_cache_bytes=64 << 20)) as running:
        yield running


def read(engine: Engine, prompt: tuple[int, ...], label: CacheLabel = KEY) -> PrefillReport:
    _, last = generated(engine.generate(GenerationRequest(prompt, 2, spans=SPANS, label=label)))
    return last.report


@pytest.mark.extended
def test_a_changed_token_is_told_with_what_is_read_behind_it(engine: Engine) -> None:
    assert read(engine, PROMPT).miss is None
    report = read(engine, CHANGED)
    assert report.cached_tokens <= PLACE
    assert (report.miss.token, report.miss.message, report.miss.role) == (PLACE, 1, "user")
    assert report.miss.read_tokens == len(PROMPT) - PLACE - 1
    told = report.to_dict()["cache"]["miss"]
    assert (told["kind"], told["token"]) == (report.miss.kind, PLACE)


TURNS = (*SPANS[:1], PromptSpan("user", 600, 604, 650, 660), PromptSpan("assistant", 660, 664, 800, 810))
ASKED_AGAIN = (*TURNS, PromptSpan("user", 810, 814, 2590, 2600))

ENVIRONMENT = (*TURNS[:2], PromptSpan("user", 660, 664, 2590, 2600))


@pytest.mark.parametrize(
    ("spans", "place", "shown"),
    [
        ((), 700, False),  # no messages: nobody knows whose text it was
        (SPANS, 300, False),  # in the system message, in front of what the user says
        (SPANS, 700, False),  # in the first question: "I am Alice, and my PIN is ..."
        (TURNS, 630, False),
        (TURNS, 655, False),  # in the template's text behind the question, whose content is the same
        (TURNS, 700, True),  # in an answer to the same question
        (ASKED_AGAIN, 700, False),  # in front of the last question
        (ASKED_AGAIN, 900, True),  # in the last question, behind the same first one
        (ENVIRONMENT, 700, False),  # in the first question, behind an environment that others have, too
        ((*ENVIRONMENT[:-1], PromptSpan("user", 660, 664, 1000, 1010)), 1100, True),  # behind such a question
        ((SPANS[0], PromptSpan("assistant", 600, 604, 650, 660), *ENVIRONMENT[2:]), 700, False),  # a greeting before it
    ],
)
def test_only_one_conversation_s_own_words_are_quoted(spans: tuple[PromptSpan, ...], place: int, shown: bool) -> None:
    changed = (*PROMPT[:place], (PROMPT[place] + 1) % 50, *PROMPT[place + 1 :])
    request = GenerationRequest(changed, 2, spans=spans)
    miss = explain_miss(request, (place, [np.array(PROMPT, dtype=np.int32)]), lambda ids: " ".join(map(str, ids)))
    assert miss.token == place
    assert miss.was == (str(PROMPT[place]) if shown else None)
    assert miss.now == str(changed[place])


@pytest.mark.extended
def test_another_key_never_learns_of_it(engine: Engine) -> None:
    read(engine, PROMPT)
    assert read(engine, CHANGED, CacheLabel("bob")).miss is None
    assert read(engine, CHANGED, replace(KEY, salt="other")).miss is None


@pytest.mark.extended
def test_nothing_looks_for_a_reason_where_the_prefix_was_found_whole(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, _ = generated(engine.generate(GenerationRequest(PROMPT, 2, spans=SPANS, label=KEY)))
    asked: list[GenerationRequest] = []
    monkeypatch.setattr(engine.caches, "miss", lambda request, decode: asked.append(request))
    assert read(engine, (*PROMPT, *answer, 3, 4, 5)).cached_tokens > len(PROMPT)
    assert not asked
    read(engine, CHANGED)
    assert asked
