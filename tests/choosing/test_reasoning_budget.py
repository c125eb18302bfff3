"""Reasoning that has used up its budget is closed, once, and never opened again; a grammar behind it still holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specprefill import (
    Constraint,
    Engine,
    EngineConfig,
    GenerationRequest,
    InvalidRequestError,
    ReasoningBudget,
    SamplingParams,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    SpeculationConfig,
    make_pair,
)
from mlx_specprefill.choosing.constraints import ReasoningBudgetState
from tests.server.fakes import byte_tokenizer
from tests.support.examples import examples
from tests.support.tiny import generated, tiny_model

V = 9
OPEN, SHUT, A = 7, 8, 6  # A begins the longer marks
MARKS = [((OPEN,), (SHUT,), (SHUT,)), ((A, OPEN), (SHUT, A), (SHUT, A, 5)), ((OPEN,), (SHUT,), (SHUT, 5, A))]
BUDGETS = st.builds(
    lambda tokens, marks, opened: ReasoningBudget(tokens, *marks, opened=opened),
    st.integers(0, 5),
    st.sampled_from(MARKS),
    st.booleans(),
)


def thought(text: Sequence[int], budget: ReasoningBudget) -> tuple[int, bool]:
    """Tokens of reasoning in a text, without those that close it for good, and whether it ends inside of it."""
    inside, count = budget.opened, 0
    for i in range(len(text)):
        seen = tuple(text[: i + 1])
        if inside:
            count += 1
            inside = seen[-len(budget.end) :] != budget.end
        else:
            inside = seen[-len(budget.start) :] == budget.start
    return count, inside


@settings(max_examples=examples(500))
@given(budget=BUDGETS, wanted=st.lists(st.integers(0, V - 1), max_size=40))
def test_reasoning_never_exceeds_its_budget(budget: ReasoningBudget, wanted: list[int]) -> None:
    """Whatever the model would like to write, also when some of it is taken back."""
    state, text = ReasoningBudgetState(budget), list[int]()
    for token in wanted:
        twin = state.fork()
        mask = state.mask(V)
        twin.accept(token)  # a proposal that is not kept
        assert mask is None or mask.any()
        before = thought(text, budget)
        if before[0] < budget.tokens:
            assert mask is None
        token = token if mask is None or mask[token] else int(np.flatnonzero(mask)[0])
        state.accept(token)
        text.append(token)
    count, inside = thought(text, budget)
    assert count <= budget.tokens + len(budget.end)
    assert not inside or count < budget.tokens + len(budget.end)


def test_what_follows_the_end_is_the_closing() -> None:
    budget = ReasoningBudget(2, (A, OPEN), (SHUT,), (SHUT, 5, A), opened=True)
    state = ReasoningBudgetState(budget)
    for token, only in ((1, None), (2, {SHUT}), (SHUT, {5}), (5, {A})):
        state.accept(token)
        mask = state.mask(V)
        assert (None if mask is None else set(np.flatnonzero(mask))) == only
    state.accept(A)
    assert set(np.flatnonzero(state.mask(V))) == set(range(V)) - {OPEN}  # it would be opened again
    state.accept(3)
    assert state.mask(V) is None


# --- in the engine ---------------------------------------------------------------------------------------------------

TOKENIZER = byte_tokenizer()
SPECIAL = TOKENIZER.get_added_vocab()
THINK, DONE = (SPECIAL["<think>"],), (SPECIAL["</think>"],)
STOP = frozenset(TOKENIZER.eos_token_ids)
SMALL = SpeculationConfig(budget=64, chunk=4, sinks=4, window=16)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    model = tiny_model("llama", seed=3, vocab_size=len(TOKENIZER))
    pair = make_pair(model, TOKENIZER, {"max_position_embeddings": 4096, "vocab_size": len(TOKENIZER)})
    config = EngineConfig(policy=SpecPrefillPolicy(densify=False), prefill_step=32, speculation=SMALL)
    with Engine(pair, config) as running:
        yield running


def asked(tokens: int, opened: bool = True, **fields: object) -> GenerationRequest:
    budget = ReasoningBudget(tokens, THINK, DONE, DONE, opened)
    fields = {"sampling": SamplingParams(temperature=1.0, seed=1), "max_tokens": 24} | fields
    prompt = tuple(TOKENIZER.encode("think about this for a while " * 3))
    return GenerationRequest(prompt, reasoning=budget, **fields)


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_the_engine_closes_reasoning(engine: Engine, tokens: int) -> None:
    free, _ = generated(engine.generate(asked(99)))
    held, _ = generated(engine.generate(asked(tokens)))
    assert held[: tokens + 1] == [*free[:tokens], *DONE]
    assert not set(THINK) & set(held[tokens + 1 :])
    assert len(held) == 24


def test_a_drafted_answer_is_held_to_it_too(engine: Engine) -> None:
    greedy = {"sampling": SamplingParams(), "max_tokens": 20}
    plain, _ = generated(engine.generate(asked(6, **greedy)))
    drafted = asked(6, **greedy, specprefill=SpecPrefillOptions(enabled=False, speculative="ngram"))
    tokens, last = generated(engine.generate(drafted))
    assert tokens == plain
    assert plain[6] == DONE[0]
    assert last.report.speculation.strategy == "ngram"


def test_a_grammar_begins_where_the_budget_ends(engine: Engine) -> None:
    grammar = Constraint('start: "yes" | "no"', starts_after=DONE)
    tokens, _ = generated(engine.generate(asked(4, constraint=grammar, stop_token_ids=STOP)))
    assert TOKENIZER.decode(tokens[5:-1]) in ("yes", "no")
    assert (tokens[4], tokens[-1] in STOP) == (DONE[0], True)


@pytest.mark.parametrize(
    "budget",
    [
        ReasoningBudget(-1, THINK, DONE, DONE),
        ReasoningBudget(1, (), DONE, DONE),
        ReasoningBudget(1, THINK, DONE, THINK),
        ReasoningBudget(1, THINK, (10**6,), (10**6,)),
    ],
)
def test_budgets_are_checked(engine: Engine, budget: ReasoningBudget) -> None:
    with pytest.raises(InvalidRequestError, match="reasoning"):
        engine.check(GenerationRequest((1, 2), 3, reasoning=budget))
