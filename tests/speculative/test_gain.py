"""When speculation is predicted to pay, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlx_specprefill.config import SpeculationConfig
from mlx_specprefill.speculative.gain import (
    Acceptance,
    DecodeCosts,
    ForwardCost,
    GainInputs,
    expected_tokens,
    predicted_gain,
)

CONFIG = SpeculationConfig(gamma=3, gamma1=2, gamma2=4, budget=1000)


@pytest.mark.parametrize(("rate", "gamma", "tokens"), [(0.0, 3, 1.0), (1.0, 3, 4.0), (0.5, 2, 1.75), (0.8, 1, 1.8)])
def test_expected_tokens(rate: float, gamma: int, tokens: float) -> None:
    assert expected_tokens(rate, gamma) == pytest.approx(tokens)


def costs(base: float, per_token: float, draft: float) -> DecodeCosts:
    """Forwards that cost the same whatever their number of rows."""
    return DecodeCosts({rows: ForwardCost(base, per_token) for rows in (1, 3, 4, 5)}, ForwardCost(draft, 0.0))


def test_a_draft_pays_by_what_it_costs() -> None:
    """3 tokens proposed at 1 ms each and verified at 10: 4 for 13 ms instead of 40."""
    sure = GainInputs(context=100, draft_context=100, outer=1.0)
    assert predicted_gain("draft", costs(10, 0, 1), CONFIG, sure) == pytest.approx(40 / 13)
    assert predicted_gain("draft", costs(10, 0, 10), CONFIG, sure) == pytest.approx(1.0)
    never = GainInputs(context=100, draft_context=100, outer=0.0)
    assert predicted_gain("draft", costs(10, 0, 1), CONFIG, never) == pytest.approx(10 / 13)


def test_retrieval_pays_where_keys_dominate() -> None:
    """At 10 000 tokens a forward takes 1 + 10 ms, on 1000 retrieved ones 1 + 1: 5 tokens for 4 * 2 + 11 ms."""
    long, short = (GainInputs(context=n, draft_context=0, outer=1.0) for n in (10_000, 500))
    assert predicted_gain("retrieval", costs(1, 1e-3, 0), CONFIG, long) == pytest.approx(55 / 19)
    assert predicted_gain("retrieval", costs(1, 1e-3, 0), CONFIG, short) == pytest.approx(1.0)


def test_choosing_chunks_anew_after_a_rejection_reads_means_and_the_shortlist() -> None:
    """Half of a forward's 10 ms for keys, of a sixteenth and of 4000; one token per round, as all are rejected."""
    never = GainInputs(context=10_000, draft_context=0, outer=0.0)
    means, listed = 5 / 16, 4000 / 10_000 * 5
    assert predicted_gain("retrieval", costs(1, 1e-3, 0), CONFIG, never) == pytest.approx(11 / (19 + means + listed))
    by_means = replace(CONFIG, shortlist=1)
    assert predicted_gain("retrieval", costs(1, 1e-3, 0), by_means, never) == pytest.approx(11 / (19 + means))
    expected = pytest.approx(11 / (4 * 4 + 11 + means + listed))
    assert predicted_gain("triforce", costs(1, 1e-3, 1), CONFIG, never) == expected


def test_ngrams_pay_where_something_is_found() -> None:
    """Half of the rounds propose 8 tokens, all accepted, at 20 ms instead of 10: 5 tokens for 15 ms instead of 50."""
    found = GainInputs(context=100, draft_context=0, outer=1.0, coverage=0.5)
    measured = DecodeCosts({1: ForwardCost(10, 0), 9: ForwardCost(20, 0)})
    assert predicted_gain("ngram", measured, SpeculationConfig(ngram=8), found) == pytest.approx(50 / 15)
    never = replace(found, coverage=0.0)
    assert predicted_gain("ngram", measured, SpeculationConfig(ngram=8), never) == pytest.approx(1.0)


def test_triforce_pays_for_inner_rounds() -> None:
    """An inner round gives 3 tokens for 2 drafts and a retrieved forward: 2 * 0.5 + 2 ms; 4 take 4 / 3 of that."""
    inputs = GainInputs(context=10_000, draft_context=0, outer=1.0, inner=1.0)
    assert predicted_gain("triforce", costs(1, 1e-3, 0.5), CONFIG, inputs) == pytest.approx(55 / (4 + 11))


def test_a_head_pays_by_what_it_costs_on_a_long_cache() -> None:
    """3 guesses at 1 + 0.01 * 100 ms each, verified at 10: 4 for 16 ms instead of 40."""
    known = DecodeCosts({rows: ForwardCost(10, 0) for rows in (1, 4)}, None, ForwardCost(1, 0.01))
    assert predicted_gain("mtp", known, CONFIG, GainInputs(100, 0, 1.0)) == pytest.approx(40 / 16)


def test_more_rows_cost_more() -> None:
    slow = DecodeCosts({1: ForwardCost(10, 0), 4: ForwardCost(30, 0)}, ForwardCost(1, 0))
    assert predicted_gain("draft", slow, CONFIG, GainInputs(0, 0, 1.0)) == pytest.approx(40 / 33)


def test_acceptance_follows_what_requests_show_and_comes_back() -> None:
    known = Acceptance(0.8)
    assert known.rate == pytest.approx(0.8)
    known.add(0, 1000)
    assert known.rate < 0.05
    for _ in range(400):
        known.forget()
    assert known.rate == pytest.approx(0.8, abs=0.02)
