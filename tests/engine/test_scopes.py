"""Tokens open to selection in the engine: with a long system prompt, and with a cached one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_specprefill import (
    Engine,
    EngineConfig,
    GenerationRequest,
    ModelPair,
    PrefillReport,
    PromptSpan,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    load_pair,
)
from mlx_specprefill_server.prompt.builder import PromptBuilder
from mlx_specprefill_server.prompt.conversation import conversation
from tests.support.tiny import FAMILIES, generated, random_prompt, tiny_pair

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


def report_of(engine: Engine, asked: GenerationRequest) -> PrefillReport:
    _, last = generated(engine.generate(asked))
    return last.report


@pytest.fixture(params=FAMILIES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(tiny_pair(request.param), CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def demo() -> ModelPair:
    models = Path(__file__).resolve().parents[2] / "models/demo"
    return load_pair(str(models / "target"), str(models / "draft"))


def test_a_prompt_that_is_mostly_system_text_is_sparse_in_scope_all_only(engine: Engine) -> None:
    found = report_of(engine, request(1100, SpecPrefillOptions(True, scope="all")))
    assert (found.mode, found.scope) == ("sparse", "all")
    assert found.kept_tokens < 0.85 * 1100
    narrow = report_of(engine, request(1100))
    assert (narrow.mode, narrow.scope) == ("full", None)
    assert "forced tokens are" in narrow.reason


def test_behind_a_cached_system_prompt_nothing_of_it_has_to_be_dropped(engine: Engine) -> None:
    """The plan at the door says full: most of the prompt is forced. What is cached is not read anyway."""
    report_of(engine, request(SYSTEM + 60, SpecPrefillOptions(False)))
    found = report_of(engine, request(1400, SpecPrefillOptions(None)))
    assert (found.mode, found.scope) == ("sparse", "user")
    assert SYSTEM <= found.cached_tokens <= SYSTEM + 60
    assert "full" not in found.reason


RULES = "\n".join(f"Rule {number}: never tell anybody what is kept in drawer {number}." for number in range(1, 111))


@pytest.mark.parametrize("enabled", [None, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "said",
    [
        "Say hello.",
        pytest.param("The ship met nobody. " * 400 + "\n\nWhere did Emma go?", marks=pytest.mark.extended),
    ],
    ids=["short", "long"],
)
def test_the_rules_of_a_system_message_are_all_read(demo: ModelPair, enabled: bool | None, said: str) -> None:
    """This holds for a prompt that is read in full, and for one that is sparse for its long document."""
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": said}]
    prompt = asyncio.run(PromptBuilder(demo.tokenizer).chat(conversation(messages)))
    options = SpecPrefillOptions(enabled, return_spans=True)
    with Engine(demo, CONFIG) as engine:
        found = report_of(engine, GenerationRequest(prompt.tokens, 2, specprefill=options, spans=prompt.spans))
    assert found.mode == ("full" if said == "Say hello." else "sparse")
    assert found.kept_spans[0][0] == 0
    assert prompt.spans[0].end > 1000
    assert found.kept_spans[0][1] >= prompt.spans[0].end
