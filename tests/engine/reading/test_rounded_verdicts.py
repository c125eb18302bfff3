"""In half precision full reading agrees with its own answer, though forwards of other sizes round otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill import GenerationRequest, SamplingParams, Verdict
from mlx_specprefill.engine.reading.verdicts import _Comparison
from tests.support.oracle import on_the_cpu_unfused
from tests.support.precision import float32_only
from tests.support.rounding import HALVES, rounded

pytestmark = float32_only("it rounds by itself")
ANSWER, PROMPT = 100, 40
FOUND = 0.3  # nats
TOP_P = SamplingParams(temperature=1.0, top_p=0.5, seed=1)
EACH = pytest.mark.parametrize(
    ("half", "answers"),
    [*((half, 1) for half in HALVES), *(pytest.param(half, 20, marks=pytest.mark.nightly) for half in HALVES)],
)


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    with on_the_cpu_unfused():
        yield


def flat_model(half: mx.Dtype) -> nn.Module:
    """A model whose tokens come in pairs that are all but equally likely: rounding chooses between the two."""
    mx.random.seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 512, "num_attention_heads": 4}
    shape = {"model_type": "llama", "vocab_size": 1024, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    model = llama.Model(llama.ModelArgs.from_dict(sizes | shape))
    one = model.lm_head.weight[::2]
    pair = one * (1 + mx.finfo(half).eps * mx.random.normal(one.shape))
    model.lm_head.weight = mx.stack([one, pair], axis=1).reshape(model.lm_head.weight.shape)
    mx.eval(model.parameters())
    return rounded(model, half)


def prompt(seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 120, PROMPT)]


def greedy(model: nn.Module, seed: int) -> list[int]:
    """An answer, one token per forward."""
    cache = make_prompt_cache(model)
    logits, answer = model(mx.array([prompt(seed)]), cache=cache)[0, -1], []
    for _ in range(ANSWER):
        answer.append(int(mx.argmax(logits).item()))
        logits = model(mx.array([answer[-1:]]), cache=cache)[0, -1]
    return answer


def read_again(model: nn.Module, seed: int, answer: list[int], sampling: SamplingParams) -> tuple[Verdict, mx.array]:
    """The verdict of full reading on an answer, and the logits (T, V) by which it chose."""
    cache = make_prompt_cache(model)
    first = model(mx.array([prompt(seed)]), cache=cache)[0, -1:]
    rest = model(mx.array([answer]), cache=cache)[0]
    comparison = _Comparison(GenerationRequest(prompt(seed), ANSWER, sampling), None, tuple(answer), first.shape[-1])
    comparison.read(first)
    comparison.read(rest)
    return comparison.verdict(), mx.concatenate([first, rest[:-1]])


@EACH
def test_full_reading_agrees_with_itself(half: str, answers: int) -> None:
    model = flat_model(HALVES[half])
    for seed in range(answers):
        verdict, _ = read_again(model, seed, greedy(model, seed), SamplingParams())
        assert verdict.word == "same"


def test_the_oracle_meets_tokens_that_rounding_decides() -> None:
    model = flat_model(HALVES["bf16"])
    answers = [greedy(model, seed) for seed in range(3)]
    read = [read_again(model, seed, answer, SamplingParams())[1] for seed, answer in enumerate(answers)]
    assert any(mx.argmax(logits, axis=-1).tolist() != answer for logits, answer in zip(read, answers, strict=True))


@pytest.mark.parametrize("half", HALVES)
def test_a_difference_that_is_no_rounding_is_found(half: str) -> None:
    """At one place of the answer stands a token that is less likely by .3 nats and more."""
    model = flat_model(HALVES[half])
    answer = greedy(model, 0)
    _, logits = read_again(model, 0, answer, SamplingParams())
    for place in (0, 17, 60):
        row = np.array(logits[place].astype(mx.float32))
        behind = np.flatnonzero(row < row.max() - FOUND)
        planted = [*answer[:place], int(behind[row[behind].argmax()])]
        assert read_again(model, 0, planted, SamplingParams())[0].agrees.tolist() == [True] * place + [False]


@pytest.mark.parametrize("half", HALVES)
def test_a_drawn_token_at_the_edge_of_top_p_is_within_reach(half: str) -> None:
    """One that is by a rounding below the last token within reach agrees, one far below it does not."""
    model = flat_model(HALVES[half])
    _, logits = read_again(model, 0, prompt(1), TOP_P)
    row = np.array(logits[0].astype(mx.float32)).astype(np.float64)
    order = np.argsort(-row, kind="stable")
    shares = np.exp(row[order] - row.max())
    shares /= shares.sum()
    last = int(np.flatnonzero(shares.cumsum() >= TOP_P.top_p)[0])
    rounding = float(np.abs(row).max()) * math.ldexp(1, {"bf16": -7, "fp16": -10}[half])
    near = [int(token) for token in order[last + 1 :] if row[order[last]] - row[token] < rounding / 2]
    for token in [int(order[last]), *near]:
        assert read_again(model, 0, [token], TOP_P)[0].agrees.tolist() == [True]
    assert read_again(model, 0, [int(order[-1])], TOP_P)[0].agrees.tolist() == [False]
