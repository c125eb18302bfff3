"""Lines that are asked behind a prompt: how many, in which prompts, and that the target reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mlx_specprefill import Engine, EngineConfig, GenerationRequest, ModelPair, PromptSpan, SpecPrefillOptions, keep_pct
from mlx_specprefill.config import SpecPrefillPolicy
from mlx_specprefill.engine.reading import scoring
from mlx_specprefill.selection import question_lines, scorer
from mlx_specprefill.selection.heads import DraftHeads, Head, LineProbe
from mlx_specprefill.selection.scorer import HeadScorer
from tests.support.tiny import generated, random_prompt, tiny_pair, values_of

CONTEXT = 4096


def pair_of(probed: bool) -> ModelPair:
    pair = tiny_pair(context=CONTEXT)
    assert pair.draft is not None
    weights = np.random.default_rng(0).normal(size=4096).astype(np.float16)
    probe = LineProbe((0,), weights[: 2 * values_of(pair.draft)].tobytes()) if probed else None
    return replace(pair, heads=DraftHeads((Head(0, 0, 1.0), Head(1, 1, 1.0)), 2, 3, {}, probe))


@pytest.mark.parametrize(("probed", "size", "most"), [(False, 3500, 64), (True, 3700, 198), (True, CONTEXT - 20, 10)])
def test_what_is_asked_is_limited(probed: bool, size: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ask = list[int](), HeadScorer._ask_again

    def noting(self: HeadScorer, draft: Any, end: int, cache: Any, texts: Sequence[Any]) -> Any:
        asked.append(sum(text.size for text in texts))
        return ask(self, draft, end, cache, texts)

    monkeypatch.setattr(HeadScorer, "_ask_again", noting)
    spans = (PromptSpan("user", 0, 2, size - 1, size),)
    options = SpecPrefillOptions(True, keep_pct("0.2"))
    with Engine(pair_of(probed), EngineConfig(policy=SpecPrefillPolicy(densify=False))) as engine:
        engine.inspect(GenerationRequest(random_prompt(size), 1, specprefill=options, spans=spans))
    assert all(tokens <= most for tokens in asked)
    assert asked or most < 32


def kept_of(last: Any) -> set[int]:
    return {index for start, end in last.report.kept_spans for index in range(start, end)}


def test_a_line_that_asks_is_read_though_an_earlier_turn_dropped_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first, answer_size, options = 900, 6, SpecPrefillOptions(return_spans=True)
    policy = SpecPrefillPolicy(threshold=300, keep_pct=keep_pct("0.2"), densify=False)
    monkeypatch.setattr(scorer, "asked_lines", lambda _, lines, *__: np.zeros(len(lines), np.float32))
    prompt = random_prompt(first)
    spans = (PromptSpan("user", 0, 0, first, first),)
    with Engine(pair_of(True), EngineConfig(policy=policy)) as engine:
        answer, last = generated(
            engine.generate(GenerationRequest(prompt, answer_size, specprefill=options, spans=spans))
        )
        before = kept_of(last)
        dropped: list[range] = []

        def one_asks(_: Any, lines: Any, *__: Any) -> Any:
            dropped[:] = [range(*line) for line in lines.tolist() if not before & set(range(*line))][1:2]
            return np.array([3.0 * (range(*line) in dropped) for line in lines.tolist()], dtype=np.float32)

        monkeypatch.setattr(scorer, "asked_lines", one_asks)
        prompt, end = (*prompt, *answer, *random_prompt(500, 9)), first + len(answer)
        spans += (
            PromptSpan("assistant", first, first, end, end),
            PromptSpan("user", end, end, len(prompt), len(prompt)),
        )
        _, last = generated(engine.generate(GenerationRequest(prompt, 2, specprefill=options, spans=spans)))
    assert last.report.mode == "sparse"
    assert last.report.cached_tokens > 0
    assert dropped
    assert {token for line in dropped for token in line} <= kept_of(last)


@pytest.mark.parametrize("probed", [True, False])
def test_a_completion_asks_by_its_places_at_no_turn(probed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second turn is short, and read whole behind the first one, a part of which was dropped."""
    known, asked = list[bool](), question_lines.asked_lines

    def noting(scores: Any, lines: Any, *given: Any) -> Any:
        known.append(scores is not None or len(lines) == 0)
        return asked(scores, lines, *given)

    monkeypatch.setattr(scorer, "asked_lines", noting)
    prompt, options = random_prompt(900), SpecPrefillOptions(return_spans=True)
    policy = SpecPrefillPolicy(threshold=300, keep_pct=keep_pct("0.2"), densify=False)
    with Engine(pair_of(probed), EngineConfig(policy=policy)) as engine:
        answer, _ = generated(engine.generate(GenerationRequest(prompt, 6, specprefill=options)))
        following = (*prompt, *answer, *random_prompt(40, 9))
        _, last = generated(engine.generate(GenerationRequest(following, 2, specprefill=options)))
    assert last.report.reason_code == "extended"
    assert known == [True, True]


def test_the_attention_of_what_is_asked_is_reserved() -> None:
    """Also on a device whose fused kernels keep no attention, so that no forward of the draft shows any."""
    request = GenerationRequest(random_prompt(3000), 1)
    with Engine(pair_of(True), EngineConfig()) as engine:
        memory = engine.memory
        for name in ("_target", "_draft"):
            setattr(memory, name, replace(getattr(memory, name), per_row=0.0, per_pair=0.0))
        floats = 3000 // 12 * 3000 * 4
        for need in (memory.need(request, "sparse"), memory.need_inspection(request)):
            assert need.working >= 3 * floats
        assert memory.need(request, "full").working < floats


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_lines_that_count_as_questions_lend_their_words_and_no_others(
    weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[list[list[int]]]()

    def noting(text: Any, asking: list[list[int]]) -> Any:
        given.append(asking)
        return np.ones(len(text.pieces), dtype=np.float32)

    monkeypatch.setattr(scoring, "word_factors", noting)
    monkeypatch.setattr(
        scorer, "asked_lines", lambda _, lines, *__: np.where(np.arange(len(lines)) == 1, weight, 0).astype(np.float32)
    )
    request = GenerationRequest(
        random_prompt(500),
        1,
        specprefill=SpecPrefillOptions(True, keep_pct("0.2")),
        spans=(PromptSpan("user", 0, 2, 499, 500),),
    )
    with Engine(pair_of(True), EngineConfig()) as engine:
        asking = engine.inspect(request).asking
    assert len(asking) == 2
    assert len(given[0]) == (2 if weight > 1 else 1)
    assert {tuple(one) for one in given[0]} <= set(asking)
