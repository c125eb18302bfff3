"""What competes, in the engine: with a system prompt that is cached, and over the turns of a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Finished,
    GenerationRequest,
    PrefillReport,
    PromptSpan,
    SpecPrefillOptions,
    SpecPrefillPolicy,
)

from ..tiny import FAMILIES, generated, random_prompt, tiny_pair

CONFIG = EngineConfig(policy=SpecPrefillPolicy(threshold=100, densify=False), prefill_step=256)
SYSTEM = 900
TOKENS = random_prompt(2000)
TRUE = SpecPrefillOptions(True)


def request(length: int, options: SpecPrefillOptions = TRUE, system: int = SYSTEM) -> GenerationRequest:
    """A system message, and a user message that goes on to `length`."""
    spans = (
        PromptSpan("system", 0, 2, system - 2, system),
        PromptSpan("user", system, system + 2, length - 4, length - 2),
    )
    return GenerationRequest(TOKENS[:length], 2, specprefill=options, spans=spans)


def account(engine: Engine, asked: GenerationRequest) -> PrefillReport:
    _, last = generated(engine.generate(asked))
    assert isinstance(last, Finished)
    return last.account


@pytest.fixture(params=FAMILIES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(tiny_pair(request.param), CONFIG) as running:
        yield running


def test_a_prompt_that_is_mostly_system_text_becomes_sparse_in_a_wider_scope(engine: Engine) -> None:
    found = account(engine, request(1100))
    assert (found.mode, found.scope) == ("sparse", "all")
    assert "scope all, in scope user forced tokens are" in found.reason
    assert found.kept_tokens < 0.85 * 1100
    narrow = account(engine, request(1100, SpecPrefillOptions(True, scope="user")))
    assert (narrow.mode, narrow.scope) == ("full", None)


def test_behind_a_cached_system_prompt_nothing_of_it_has_to_be_dropped(engine: Engine) -> None:
    """The plan at the door says full: most of the prompt is forced. What is cached is not read anyway."""
    account(engine, request(SYSTEM + 60, SpecPrefillOptions(False)))
    found = account(engine, request(1400, SpecPrefillOptions(None, scope="user")))
    assert (found.mode, found.scope) == ("sparse", "user")
    assert SYSTEM <= found.cached_tokens <= SYSTEM + 60
    assert "full" not in found.reason


def test_a_later_turn_goes_on_in_the_scope_of_its_sparse_cache(engine: Engine) -> None:
    """Longer, it would have enough to choose in a narrower scope, and would have to read all of the system text."""
    first = account(engine, request(1100))
    assert first.scope == "all"
    asked = request(1100)
    answer = generated(engine.generate(asked))[0]
    M = 1900
    tokens = [*asked.prompt.tolist(), *answer, *TOKENS[1102:M]]
    user = asked.spans[1]
    spans = (
        *asked.spans,
        PromptSpan("assistant", user.end, user.end + 2, 1104, 1106),
        PromptSpan("user", 1106, 1108, M - 4, M - 2),
    )
    later = account(engine, replace(asked, prompt=tokens, spans=spans))
    assert (later.mode, later.scope) == ("sparse", "all")
    assert later.continuation is not None
