"""The n-gram look-up, against a search that is too simple to be wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence

import mlx.nn as nn
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlx_specprefill import Constraint
from mlx_specprefill.choosing.constraints import Grammars
from mlx_specprefill.config import SpeculationConfig
from mlx_specprefill.errors import Refused
from mlx_specprefill.request import SamplingParams
from mlx_specprefill.speculative.acceptance import TokenSampler
from mlx_specprefill.speculative.ngram import NgramProposer, continuation_of
from mlx_specprefill.speculative.proposer import Models, Verified
from tests.server.fakes import byte_tokenizer


def searched(text: Sequence[int], least: int, count: int) -> list[int]:
    """Every earlier place, one by one."""
    best, found = 0, list[int]()
    for end in range(1, len(text)):
        length = 0
        while length < min(end, 32) and text[end - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        if length >= max(best, least, 1):
            best, found = length, list(text[end : end + count])
    return found


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.integers(1, 4), st.integers(1, 9))
def test_the_latest_of_the_longest_matches_goes_on(text: list[int], least: int, count: int) -> None:
    assert continuation_of(np.array(text, dtype=np.int32), least, count).tolist() == searched(text, least, count)


def proposer(prompt: Sequence[int], **changes: int) -> NgramProposer:
    models = Models(nn.Module(), Refused("none"), SpeculationConfig(**changes))
    return NgramProposer(models, np.array(prompt, dtype=np.int32))


def sampler(**changes: object) -> TokenSampler:
    return TokenSampler(SamplingParams(temperature=0), 256, **changes)


def test_an_answer_that_repeats_the_prompt_is_trusted_more_and_more() -> None:
    prompt = list(range(100))
    given, text, asked = proposer(prompt), [50, 51, 52], []
    for _ in range(4):
        proposal = given.propose(text, 8, sampler())
        asked.append(len(proposal.tokens))
        assert proposal.tokens == prompt[text[-1] + 1 :][: asked[-1]]
        assert proposal.distributions == proposal.tokens
        text += proposal.tokens
        given.accept(Verified(len(text), asked[-1], asked[-1], 0))
    assert asked == [2, 4, 8, 8]
    given.accept(Verified(len(text), 8, 3, 0))
    assert len(given.propose(text, 8, sampler()).tokens) == 3
    given.accept(Verified(len(text), 3, 0, 0))
    assert len(given.propose(text, 8, sampler()).tokens) == 1


def test_after_wrong_proposals_only_longer_matches_count() -> None:
    """Twice as long after each of which nothing was accepted; after one that is right in part, as long as at first."""
    prompt = list(range(100))
    given, text = proposer(prompt, ngram_match=3), list[int]()

    def found(length: int) -> bool:
        """With the last `length` tokens as in the prompt, and what is before them as nowhere."""
        text.extend([1000 + len(text), *prompt[50 - length : 50]])
        proposed = bool(given.propose(text, 8, sampler()).tokens)
        assert given.idle(text) != proposed
        return proposed

    shortest = []
    for accepted in (0, 0, 0, 0, 1):
        shortest.append(next(length for length in range(1, 40) if found(length)))
        given.accept(Verified(1, 4, accepted, 0))
    assert shortest == [3, 6, 12, 24, 32]
    assert not found(2)
    assert found(3)


def test_the_answer_itself_is_searched_however_long_it_gets() -> None:
    given, text = proposer([1, 2]), list(range(10, 700))
    assert given.propose(text[:5], 2, sampler()).tokens == []
    text += [20, 21, 22]
    assert given.propose(text, 2, sampler()).tokens == [23, 24]


def test_what_the_grammar_forbids_is_not_proposed() -> None:
    """Nor what follows it. The answer's beginning may be more than the grammar has been told of."""
    tokenizer = byte_tokenizer()
    end = frozenset({tokenizer.eos_token_id})
    grammar = Grammars(tokenizer, end).state(Constraint(f"start: {json.dumps('xyabQ')}"), end)
    prompt, text = (tokenizer.encode(part, add_special_tokens=False) for part in ("xyabcdef", "xy"))
    given = proposer(prompt, ngram_match=2)
    given.accept(Verified(2, 2, 2, 0))
    assert tokenizer.decode(given.propose(text, 8, sampler()).tokens) == "abcd"
    bound = sampler(grammar=grammar)
    bound.commit(text[:1])
    assert tokenizer.decode(given.propose(text, 8, bound).tokens) == "ab"


def test_a_long_prompt_is_searched_in_linear_time() -> None:
    """65 536 equal tokens: every place matches at every length."""
    text = np.zeros(65_536, dtype=np.int32)
    assert continuation_of(text, 3, 4).size == 1  # the latest place is the one before the last token
