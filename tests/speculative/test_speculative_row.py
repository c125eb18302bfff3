"""Rounds without a proposal: as in a batch of plain rows, the next forward is queued before a token is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specprefill.config import SpeculationConfig
from mlx_specprefill.errors import Refused
from mlx_specprefill.request import SamplingParams
from mlx_specprefill.speculative.acceptance import Distribution, TokenSampler
from mlx_specprefill.speculative.ngram import NgramProposer
from mlx_specprefill.speculative.proposer import Models
from mlx_specprefill.speculative.speculative_row import SpeculativeRow
from tests.support.autoregressive import decode
from tests.support.rows import Row, alone, assert_same_contents, logprob_error, prefilled, tokens
from tests.support.tiny import VOCAB, random_prompt, tiny_model

COUNT = 24


class Counting(TokenSampler):
    """A sampler that counts how often a round had to wait for its token."""

    waited = 0

    def distributions(self, logits: mx.array, before: Sequence[int], fed: Sequence[int] = ()) -> list[Distribution]:
        self.waited += 1
        return super().distributions(logits, before, fed)


def begun(model: Any, row: Row, match: int, **sampling: Any) -> tuple[SpeculativeRow, Counting]:
    cache, logits = prefilled(model, row)
    models = Models(model, Refused("none"), SpeculationConfig(ngram=4, ngram_match=match))
    proposer = NgramProposer(models, np.array(row.prompt, np.int32))
    sampler = Counting(SamplingParams(**sampling), VOCAB)
    return SpeculativeRow(model, cache, logits, proposer, sampler, COUNT, logprobs=row.logprobs), sampler


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gpt_oss"])
@pytest.mark.parametrize("kept", [None, np.r_[4:20, 39].astype(np.int32)])
def test_nothing_is_waited_for_where_nothing_is_found(family: str, kept: Any) -> None:
    """The answer and the cache are those of plain decoding, one forward per token."""
    model, row = tiny_model(family), Row(random_prompt(40), kept, logprobs=3)
    expected, cache = alone(model, row, COUNT)
    running, sampler = begun(model, row, match=33)  # longer than what is compared
    events = [running.first]
    while not running.ended:
        new = running.step()
        assert len(new) == (running.steps > 1)  # the first one is told before
        events += new
    assert tokens(events) == tokens(expected)
    assert logprob_error(events, expected) < 1e-4
    assert sampler.waited == 1  # for the first token, which follows the prompt
    assert running.steps == COUNT
    model(mx.array([[events[-1].token]]), cache=cache)  # a drafted row has fed its last token
    assert_same_contents(running.cache, cache)


def test_a_match_ends_it_and_its_end_begins_it_again() -> None:
    model, row = tiny_model("llama"), Row(random_prompt(40) * 3, logprobs=3)
    expected, _ = alone(model, row, COUNT)
    running, sampler = begun(model, row, match=1)
    while not running.ended:
        running.step()
    assert running.tokens == tokens(expected)
    assert running.acceptance.judged > 0
    assert 1 < sampler.waited <= running.steps + 1


@pytest.mark.parametrize("after", [1, 2, 5])
def test_a_row_can_leave_at_any_time(after: int) -> None:
    model, row = tiny_model("llama"), Row(random_prompt(40), logprobs=3)
    expected, _ = alone(model, row, COUNT)
    running, _ = begun(model, row, match=33)
    for _ in range(after):
        running.step()
    running.leave()
    rest = decode(model, running.cache, running.logits, lambda x: mx.argmax(x, axis=-1), [], COUNT - after, 3)
    assert running.tokens + tokens(list(rest)) == tokens(expected)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_the_first_token_needs_no_forward(after: int) -> None:
    """It is returned once, whatever the row does next, and is in the cache only when it was fed."""
    model, row = tiny_model("llama"), Row(random_prompt(40), logprobs=3)
    expected, _ = alone(model, row, COUNT)
    running, _ = begun(model, row, match=33)
    assert (tokens([running.first]), running.steps, running.tokens) == (tokens(expected)[:1], 0, [])
    assert logprob_error([running.first], expected[:1]) < 1e-4
    events = [running.first, *(event for _ in range(after) for event in running.step()), *running.leave()]
    assert tokens(events) == running.tokens == tokens(expected)[: max(after, 1)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_is_read_while_the_next_forward_runs(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is queued by itself before the forward that follows it: arrays that are queued at once can be read only once
    all of them are done."""
    order: list[str] = []
    queued: dict[int, str] = {}  # by the arrays' ids
    alive: list[Any] = []  # so that no other array gets the id
    queue, read = mx.async_eval, np.array

    def noted(*arrays: mx.array) -> None:
        name = "token" if arrays[0].size == 1 else "forward"
        order.append(f"queue {name}")
        queued.update({id(array): f"{name}, {len(arrays)} at once" for array in arrays})
        alive.extend(arrays)
        queue(*arrays)

    def noted_read(value: Any, *rest: Any, **named: Any) -> Any:
        if isinstance(value, mx.array):
            order.append(f"read {queued.get(id(value), 'what was not queued')}")
        return read(value, *rest, **named)

    running, sampler = begun(tiny_model("llama"), Row(random_prompt(40)), match=33, temperature=temperature)
    running.step()  # the token that follows the prompt is known already
    monkeypatch.setattr(mx, "async_eval", noted)
    monkeypatch.setattr(np, "array", noted_read)
    for _ in range(3):
        running.step()
    assert order == ["queue token", "queue forward", "read token, 1 at once"] * 3
    assert sampler.waited == 1
