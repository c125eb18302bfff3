"""A request that reads again what the cache holds says why, and only such a request looks for a reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from mlx_specprefill import CacheLabel, Engine, EngineConfig, GenerationRequest, PrefillReport, PromptSpan
from mlx_specprefill.engine.prefixes import caches
from mlx_specprefill.engine.prefixes.misses import explain_miss
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


@pytest.mark.parametrize("label", [CacheLabel(), KEY, CacheLabel(salt="secret")])
def test_words_are_quoted_where_all_is_known_to_be_of_one_party(label: CacheLabel) -> None:
    """Whatever both begin with: a question and its answer may be those of two people."""
    turns = (*SPANS[:1], PromptSpan("user", 600, 604, 650, 660), PromptSpan("assistant", 660, 664, 690, 700))
    request = GenerationRequest(CHANGED, 2, spans=(*turns, PromptSpan("tool", 700, 700, 2590, 2600)), label=label)
    cached = (PLACE, [np.array(PROMPT, dtype=np.int32)])
    miss = explain_miss(request, cached, lambda ids: " ".join(map(str, ids)))
    assert (miss.was, miss.now) == (str(PROMPT[PLACE]) if label.salt else None, str(CHANGED[PLACE]))


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
    monkeypatch.setattr(caches, "explain_miss", lambda request, *_: asked.append(request))
    assert read(engine, (*PROMPT, *answer, 3, 4, 5)).cached_tokens > len(PROMPT)
    assert not asked
    read(engine, CHANGED)
    assert asked
