"""The tokens that an MTP head reads, and its entries when guesses are accepted and rejected."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specprefill.adapters.mtp import MTPHead
from mlx_specprefill.cache.positioned import PositionedKVCache, place
from mlx_specprefill.config import SpeculationConfig
from mlx_specprefill.engine.prefixes.caches import empty_cache
from mlx_specprefill.errors import Refused
from mlx_specprefill.speculative.acceptance import TokenSampler
from mlx_specprefill.speculative.mtp_proposer import MTPProposer
from mlx_specprefill.speculative.proposer import Models
from mlx_specprefill.speculative.speculative_row import SpeculativeRow
from tests.support.oracle import on_the_cpu_unfused
from tests.support.rows import Row, alone, assert_same_contents, tokens
from tests.support.steps import finish, prefill
from tests.support.tiny import VOCAB, random_prompt, tiny_head, tiny_model

COUNT = 20


@pytest.fixture(autouse=True)
def _unfused() -> Iterator[None]:
    with on_the_cpu_unfused():
        yield


@cache
def model() -> Any:
    return tiny_model("qwen3_5")


@cache
def rows() -> list[Row]:
    """Dense and with gaps; one with a gap right before its last token."""
    prompt = random_prompt(40, 3)
    kept = np.array([0, 1, 2, 9, 10, 20, 21, 22, 23, 38, 39], dtype=np.int32)
    return [Row(prompt), Row(prompt, kept), Row(prompt, np.append(kept[:-2], np.int32(39)))]


class Knowing(MTPHead):
    """A head that knows the answer, and guesses something else at some of its indices."""

    def __init__(self, head: MTPHead, prompt: Sequence[int], answer: Sequence[int], wrong: frozenset[int]) -> None:
        super().__init__(model(), head.layers)
        self._start, self._answer, self._wrong = len(prompt), answer, wrong
        self._last = 0

    def __call__(self, hidden: mx.array, following: mx.array, cache: Any) -> mx.array:
        out = super().__call__(hidden, following, cache)
        self._last = cache.next - 1  # entry p guesses token p + 2
        return out

    def run_target(self, tokens: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        return MTPHead(model(), self.layers).run_target(tokens, cache)

    def logits(self, out: mx.array) -> mx.array:
        index = self._last + 2 - self._start
        right = self._answer[index] if index < len(self._answer) else 0
        guess = right if index not in self._wrong else (right + 1) % VOCAB
        return 100.0 * (mx.arange(VOCAB) == guess).astype(mx.float32)[None, None]


def drafted(head: MTPHead, row: Row, count: int, gamma: int) -> tuple[SpeculativeRow, MTPProposer]:
    cache_of_target = empty_cache(model())
    fed = np.arange(len(row.prompt), dtype=np.int32) if row.kept is None else row.kept
    models = Models(model(), Refused("none"), SpeculationConfig(gamma=gamma), {"mtp": head})
    proposer = MTPProposer(models, np.array(row.prompt, np.int32))
    logits = finish(prefill(proposer.read_along(model(), fed), cache_of_target, row.prompt, row.kept, 7))
    sampler = TokenSampler(row.sampling, logits.shape[-1])
    running = SpeculativeRow(model(), cache_of_target, logits, proposer, sampler, count)
    while not running.ended:
        running.step()
    return running, proposer


@cache
def answer_of(number: int) -> list[int]:
    return tokens(alone(model(), rows()[number], COUNT)[0])


@cache
def entries(number: int) -> PositionedKVCache:
    """All of a row's text, one by one, from hidden states of single-token forwards."""
    row, answer, head = rows()[number], answer_of(number), tiny_head(model())
    cache_of_target = empty_cache(model())
    kept = list(range(len(row.prompt))) if row.kept is None else row.kept.tolist()
    text = dict(enumerate([*row.prompt, *answer]))
    positions = [*kept, *range(len(row.prompt), len(text))]
    fresh = PositionedKVCache()
    for position in positions:
        place(cache_of_target, np.array([position], dtype=np.int32))
        _, hidden = head.run_target(mx.array([[text[position]]]), cache_of_target)
        if position + 1 in positions:
            place([fresh], np.array([position], dtype=np.int32))
            head(hidden, mx.array([[text[position + 1]]]), fresh)
    return fresh


PATTERNS: list[frozenset[int]] = [
    frozenset(),
    frozenset(range(COUNT)),
    frozenset(range(2, COUNT, 3)),
    frozenset(range(1, COUNT, 5)) | frozenset({2, 3}),
]


@pytest.mark.extended
@pytest.mark.parametrize("wrong", PATTERNS, ids=["right", "wrong", "every third", "mixed"])
@pytest.mark.parametrize("number", range(3))
def test_entries_are_those_of_a_fresh_run(number: int, wrong: frozenset[int]) -> None:
    """The entries cover the kept pairs of the prompt and of the answer, with guesses taken back in between."""
    row, answer = rows()[number], answer_of(number)
    head = Knowing(tiny_head(model()), row.prompt, answer, wrong)
    running, proposer = drafted(head, row, COUNT, 3)
    assert running.tokens == answer
    assert running.acceptance.rate == (0.0 if len(wrong) == COUNT else 1.0) or 0 < len(wrong) < COUNT
    if running._verified is not None:
        proposer.accept(running._verified)
    fresh = copy.deepcopy(entries(number))
    fresh.trim(fresh.slots - proposer.entries.slots)
    assert_same_contents([proposer.entries], [fresh], atol=1e-4)
    kept = np.arange(len(row.prompt)) if row.kept is None else row.kept
    pairs = int((np.diff(kept) == 1).sum())
    assert proposer.entries.slots >= pairs + COUNT - 4  # the last round needs no proposal


def test_a_right_head_saves_forwards() -> None:
    row, answer = rows()[1], answer_of(1)
    running, _ = drafted(Knowing(tiny_head(model()), row.prompt, answer, frozenset()), row, COUNT, 3)
    assert running.steps == COUNT // 4


def test_a_prompt_of_one_token() -> None:
    row = Row((5,))
    answer = tokens(alone(model(), row, 8)[0])
    running, _ = drafted(tiny_head(model()), row, 8, 3)
    assert running.tokens == answer
