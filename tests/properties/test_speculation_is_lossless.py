"""Whatever proposes, the answer is the one that the target gives alone: greedy tokens are identical."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill.adapters.mtp import ARCHITECTURES as HEADED
from mlx_specprefill.adapters.mtp import MTPHead
from mlx_specprefill.choosing.sampling import logits_processors
from mlx_specprefill.config import SpeculationConfig, SpeculationName
from mlx_specprefill.engine.prefixes.caches import empty_cache
from mlx_specprefill.events import TokenEvent
from mlx_specprefill.request import SamplingParams
from mlx_specprefill.speculative import acceptance as verify
from mlx_specprefill.speculative.acceptance import Rng, TokenSampler
from mlx_specprefill.speculative.proposer import Models
from mlx_specprefill.speculative.speculative_row import SpeculativeRow
from mlx_specprefill.speculative.strategies import STRATEGIES, refusal
from tests.speculative.probabilities import enumerate_distribution, total_variation
from tests.support.oracle import build, vocabulary
from tests.support.rows import Row, alone, assert_same_contents, logprob_error, make_rows, tokens
from tests.support.steps import finish, prefill
from tests.support.tiny import CONFIGS, FAMILIES, VOCAB, tiny_head, tiny_model

CLOSE = 1e-4
COUNT = 24
MORE = ("lfm2", "granitemoehybrid", "gemma3_text", "falcon_h1", "qwen3_5_moe")


pytestmark = pytest.mark.usefixtures("on_the_cpu")


@cache
def model_of(name: str, seed: int = 0) -> Any:
    return tiny_model(name, seed) if name in FAMILIES else build(name, seed=seed)


@cache
def head_of(name: str) -> MTPHead | None:
    return tiny_head(model_of(name)) if name in HEADED else None


def models_of(name: str, draft: Any, config: SpeculationConfig) -> Models:
    head = head_of(name)
    own_parts = {} if head is None else {"mtp": head}
    return Models(model_of(name), draft, config, own_parts, getattr(draft, "rows", None))


def cases(*names: str) -> list[tuple[str, SpeculationName]]:
    """Every strategy that a model of that name can have."""
    return [(name, strategy) for name in names for strategy in STRATEGIES if strategy != "mtp" or name in HEADED]


@cache
def rows_of(name: str, seed: int = 3) -> list[Row]:
    """Dense and sparse by turns, shorter and longer than windows and budget; log-probabilities of the first two."""
    made = make_rows(vocabulary(model_of(name)), 4, seed=seed)
    return [replace(row, logprobs=row.logprobs if index < 2 else None) for index, row in enumerate(made)]


@cache
def plain(name: str, index: int, seed: int = 3) -> tuple[list[TokenEvent], list[Any]]:
    """The answer without proposals, and the cache that holds all of it. Nobody may write to it."""
    model, row = model_of(name), rows_of(name, seed)[index]
    events, prompt_cache = alone(model, row, COUNT)
    model(mx.array([tokens(events)[-1:]]), cache=prompt_cache)
    mx.eval([part.state for part in prompt_cache])
    return events, prompt_cache


def read(draft: Any, prompt: tuple[int, ...]) -> list[Any]:
    prompt_cache = make_prompt_cache(draft)
    mx.eval(draft(mx.array([list(prompt)]), cache=prompt_cache))
    return list(prompt_cache)


def speculate(
    name: str,
    strategy: SpeculationName,
    row: Row,
    config: SpeculationConfig,
    draft: Any = None,
    count: int = COUNT,
    stops: frozenset[int] = frozenset(),
    rng: Rng | None = None,
) -> tuple[list[TokenEvent], SpeculativeRow]:
    model = model_of(name)
    draft = model if draft is None else draft
    prompt_cache = empty_cache(model)
    fed = np.arange(len(row.prompt), dtype=np.int32) if row.kept is None else row.kept
    models = models_of(name, draft, config)
    proposer = STRATEGIES[strategy](models, np.array(row.prompt, np.int32))
    logits = finish(prefill(proposer.read_along(model, fed), prompt_cache, row.prompt, row.kept, 16))
    if proposer.prompt_reader is not None:
        proposer.cache = read(draft, row.prompt)
    sampler = TokenSampler(row.sampling, logits.shape[-1], logits_processors(row.sampling), stops=stops)
    sampler.rng = rng or sampler.rng
    finish(proposer.start(prompt_cache))
    running = SpeculativeRow(model, prompt_cache, logits, proposer, sampler, count, logprobs=row.logprobs)
    events = [running.first]
    while not running.ended:
        events += running.step()
    return events, running


SMALL = SpeculationConfig(budget=64, chunk=4, sinks=4, window=16, ngram_match=1)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "strategy"),
    [*cases(*FAMILIES), *(pytest.param(*case, marks=pytest.mark.nightly) for case in cases(*MORE))],
)
def test_greedy_answers_are_identical(name: str, strategy: SpeculationName) -> None:
    """Drafted by the same and by another model.

    Afterwards the target's cache is that of a plain run, whatever was accepted and rejected on the way.
    """
    model = model_of(name)
    assert refusal(strategy, models_of(name, model, SMALL)) is None
    for index, row in enumerate(rows_of(name)):
        expected, held = plain(name, index)
        draft = model if index % 2 else model_of(name, 9)
        events, running = speculate(name, strategy, row, SMALL, draft)
        assert tokens(events) == tokens(expected)
        assert row.logprobs is None or logprob_error(events, expected) < CLOSE
        assert_same_contents(running.cache, held, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss"])
@pytest.mark.parametrize("gammas", [(1, 2), (2, 5), (4, 8)])
@pytest.mark.extended
def test_any_number_of_proposed_tokens(name: str, gammas: tuple[int, int]) -> None:
    gamma1, gamma2 = gammas
    config = replace(SMALL, gamma=gamma2, gamma1=gamma1, gamma2=gamma2)
    row, (expected, _) = rows_of(name, 8)[3], plain(name, 3, 8)
    for _, strategy in cases(name):
        events, _ = speculate(name, strategy, row, config, model_of(name, 9))
        assert tokens(events) == tokens(expected)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss", "nemotron_h", "gemma3_text"])
def test_a_budget_for_everything_accepts_everything(name: str) -> None:
    """The retrieved part is then the whole cache, so whatever TriForce proposes on it is right."""
    row = rows_of(name)[1]
    config = replace(SMALL, budget=2048)
    _, running = speculate(name, "triforce", row, config, model_of(name, 9))
    assert running.acceptance.rate == 1.0
    assert running.steps <= 2 + COUNT // (config.gamma2 + 1)
    _, running = speculate(name, "draft", replace(row, kept=None), config, model_of(name))
    assert running.acceptance.rate == 1.0


@pytest.mark.extended
@pytest.mark.parametrize(("name", "strategy"), cases("llama", "qwen3_5", "gpt_oss"))
def test_nothing_follows_the_end(name: str, strategy: SpeculationName) -> None:
    """First and last of a round, in its middle; what is left of the row is what a plain one leaves."""
    row, answer = rows_of(name)[3], tokens(plain(name, 3)[0])
    for stop in {answer[index] for index in (0, 4, 6, 7, 8, 15)}:
        length = answer.index(stop) + 1
        events, running = speculate(name, strategy, row, SMALL, stops=frozenset({stop}))
        assert tokens(events) == answer[:length]
        assert_same_contents(running.cache, left_after(name, length), atol=1e-3)


@cache
def left_after(name: str, length: int) -> list[Any]:
    return alone(model_of(name), rows_of(name)[3], length + 1)[1]


def test_the_draft_holds_what_precedes_the_next_token() -> None:
    """No token twice, none left out: its own next token is what it says after reading the whole text."""
    row = replace(make_rows(VOCAB, 4, seed=3)[0], logprobs=None)
    draft = model_of("llama", 9)
    _, running = speculate("llama", "draft", row, SMALL, draft, count=30)
    held = running.proposer.held  # type: ignore[attr-defined]
    cache_of_draft = running.proposer.cache
    assert all(part.offset == len(row.prompt) + held for part in cache_of_draft)
    rest = [*running.tokens[held:], 5]
    ours = draft(mx.array([rest]), cache=cache_of_draft)[0, -1]
    theirs = draft(mx.array([[*row.prompt, *running.tokens, 5]]))[0, -1]
    np.testing.assert_allclose(np.array(ours), np.array(theirs), rtol=1e-4, atol=1e-4)


# --- sampling --------------------------------------------------------------------------------------------------------

PENALISED = SamplingParams(presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={5: 2.0})


@pytest.mark.parametrize(("name", "strategy"), [*cases("llama"), ("qwen3_5", "mtp")])
def test_penalties_follow_the_text_inside_a_proposal(name: str, strategy: SpeculationName) -> None:
    row = replace(make_rows(VOCAB, 4, seed=3)[1], sampling=PENALISED)
    expected, _ = alone(model_of(name), row, COUNT)
    events, _ = speculate(name, strategy, row, SMALL, model_of(name, 9))
    assert tokens(events) == tokens(expected)
    assert logprob_error(events, expected) < CLOSE


def true_distribution(
    target: Any, prompt: tuple[int, ...], params: SamplingParams, count: int, size: int = 2
) -> dict[tuple[int, ...], float]:
    """The target's own distribution of the first `count` tokens, from plain forwards over the whole text."""
    sampler, distribution = TokenSampler(params, size), {(): 1.0}
    for _ in range(count):
        longer: dict[tuple[int, ...], float] = {}
        for text, weight in distribution.items():
            (following,) = sampler.distributions(target(mx.array([[*prompt, *text]]))[:, -1], text)
            longer |= {(*text, token): weight * share for token, share in enumerate(following)}
        distribution = longer
    return distribution


def chosen_on_the_host(sampler: TokenSampler, logits: mx.array, before: Sequence[int]) -> mx.array:
    """The device's own draws can't be enumerated."""
    (distribution,) = sampler.distributions(logits, before)
    return mx.array([verify.draw(distribution, sampler.rng)])


@cache
def two_tokens(name: str, seed: int, size: int = 2) -> Any:
    shape = {"vocab_size": size, "num_hidden_layers": 2}
    changes = {"text_config": {**CONFIGS[name]["text_config"], **shape}} if name in HEADED else shape
    return tiny_model(name, seed, **changes)


@pytest.mark.parametrize(("strategy", "mutated"), [*((name, False) for name in STRATEGIES), ("draft", True)])
@pytest.mark.extended
def test_the_running_code_has_the_targets_distribution(
    strategy: SpeculationName, mutated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every random choice is enumerated, on two tokens; with the published rejection rule it fails.

    The model's float32 logits differ by rounding between forwards of one row and of several.
    """
    name = "qwen3_5" if strategy == "mtp" else "llama"
    small = {seed: two_tokens(name, seed) for seed in (0, 9)}
    head = tiny_head(small[0]) if strategy == "mtp" else None
    monkeypatch.setitem(globals(), "model_of", lambda name, seed=0: small[seed])
    monkeypatch.setitem(globals(), "head_of", lambda name: head)
    monkeypatch.setattr(TokenSampler, "choose", chosen_on_the_host)
    if mutated:
        monkeypatch.setattr(verify, "residual", lambda p, q: p)
    params = SamplingParams(temperature=1.5)
    prompt = tuple(np.random.default_rng(1).integers(0, 2, 24).tolist())
    config = replace(SMALL, budget=8, chunk=2, gamma=2, gamma1=1, gamma2=2)

    def answer(rng: Rng) -> tuple[int, ...]:
        events, _ = speculate(name, strategy, Row(prompt, None, params), config, small[9], count=3, rng=rng)
        return tuple(tokens(events))

    error = total_variation(enumerate_distribution(answer), true_distribution(small[0], prompt, params, 3))
    assert error > 1e-3 if mutated else error < 1e-5


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 4)], ids=lambda sizes: f"{sizes[0]} and {sizes[1]} rows")
@pytest.mark.parametrize("strategy", ["draft", "triforce", "ngram"])
def test_models_with_other_padding_have_the_targets_distribution(
    strategy: SpeculationName, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target and draft have another number of rows. A row that does not exist is never read."""
    target, draft = two_tokens("llama", 0, sizes[0]), two_tokens("llama", 9, sizes[1])
    monkeypatch.setitem(globals(), "model_of", lambda name, seed=0: target)
    monkeypatch.setattr(TokenSampler, "choose", chosen_on_the_host)
    params = SamplingParams(temperature=1.5)
    prompt = tuple(np.random.default_rng(1).integers(0, 2, 24).tolist())
    config = replace(SMALL, budget=8, chunk=2, gamma=1, gamma1=1, gamma2=1)

    def answer(rng: Rng) -> tuple[int, ...]:
        row = Row(prompt, None, params)
        events, _ = speculate("llama", strategy, row, config, checked(draft, sizes[1]), count=2, rng=rng)
        return tuple(tokens(events))

    expected = true_distribution(target, prompt, params, 2, sizes[0])
    assert total_variation(enumerate_distribution(answer), expected) < 1e-5


class checked:  # noqa: N801 - stands for the model
    """A draft that refuses to read a token without a row."""

    def __init__(self, model: Any, rows: int) -> None:
        self._model, self.rows = model, rows

    def __call__(self, ids: mx.array, **more: Any) -> mx.array:
        assert int(ids.max()) < self.rows
        logits: mx.array = self._model(ids, **more)
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


V = 12


@pytest.mark.parametrize("rows", [V - 3, V, V + 5])
def test_a_proposed_distribution_is_over_the_targets_tokens(rows: int) -> None:
    """A token that only one model has is never proposed: the other rows, normalised."""
    logits = mx.array(np.random.default_rng(0).normal(size=(3, rows)).astype(np.float32))
    both = min(rows, V)
    weights = np.exp(np.array(logits)[:, :both].astype(np.float64))
    weights /= weights.sum(axis=-1, keepdims=True)
    plain = SamplingParams(temperature=1.0)
    for params in (plain, replace(plain, top_k=2, top_p=0.9), replace(plain, logit_bias={V - 1: 3.0})):
        got = TokenSampler(params, V, logits_processors(params)).distributions(logits, [1])
        assert [part.shape for part in got] == [(V,)] * 3
        assert all(part[both:].sum() == 0 for part in got)
        if params == plain:
            np.testing.assert_allclose(np.array(got)[:, :both], weights, rtol=1e-5)
    (certain,) = TokenSampler(SamplingParams(temperature=0), V).distributions(logits[:1], [])
    assert certain == int(np.argmax(np.array(logits)[0, :both]))
