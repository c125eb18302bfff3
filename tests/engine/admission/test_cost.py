"""Times predicted from measured times."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from mlx_specprefill import SpecPrefillPolicy
from mlx_specprefill.engine.admission.cost import ModelCost, PairCost, Sample, break_even, fit
from mlx_specprefill.request import Prediction

TARGET = ModelCost(
    fixed_ms=5.0, token_ms=0.4, pair_ms=2e-5, square_ms=1.5e-5, end_ms=3.0, end_token_ms=1e-4, end_tokens=32
)
DRAFT = ModelCost(
    fixed_ms=2.0, token_ms=0.05, pair_ms=4e-6, square_ms=2e-6, end_ms=40.0, end_token_ms=1e-3, end_tokens=1
)
PAIR = PairCost(TARGET, DRAFT, 1024, 512)
POLICY = SpecPrefillPolicy(threshold=None, min_saving_share=Fraction(1, 5), min_saving_ms=0.0)


def by_slices(cost: ModelCost, tokens: int, offset: int, step: int) -> float:
    """Slice by slice, as the prefill runs."""
    total, start = 0.0, 0
    last = tokens - cost.end_tokens
    while start < last:
        n = min(step, last - start)
        total += cost.fixed_ms + cost.token_ms * n + cost.pair_ms * n * (offset + start) + cost.square_ms * n * n
        start += n
    return total + cost.end_ms + cost.end_token_ms * (offset + tokens)


@pytest.mark.parametrize(("tokens", "offset", "step"), [(1, 0, 8), (9, 0, 8), (5000, 0, 512), (777, 3000, 256)])
@pytest.mark.parametrize("cost", [TARGET, DRAFT])
def test_a_prefill_is_the_sum_of_its_slices(cost, tokens, offset, step):
    assert cost.prefill_ms(tokens, offset, step) == pytest.approx(by_slices(cost, tokens, offset, step))


def test_steps_are_never_longer_than_allowed():
    assert [PAIR.steps(longest) for longest in (2048, 700, 100)] == [(1024, 512), (700, 512), (100, 100)]


def test_a_prediction_adds_the_draft_over_everything_and_the_target_over_what_is_kept():
    predicted = PAIR.predict(8000, 1600, cached=2000, draft_cached=1000, steps=(512, 1024))
    assert predicted.full_ms == pytest.approx(by_slices(TARGET, 6000, 2000, 512))
    sparse = by_slices(DRAFT, 7000, 1000, 1024) + by_slices(TARGET, 1600, 2000, 512)
    assert predicted.sparse_ms == pytest.approx(sparse)


def test_staged_the_layers_behind_the_first_ones_read_what_is_kept():
    """Their forwards cost what the first ones leave of the target's; the draft's end was paid already."""
    staged = replace(PAIR, staged=True)
    predicted = staged.predict(8000, 1600, cached=2000, draft_cached=1000, steps=(512, 1024))
    rest = replace(TARGET, fixed_ms=3.0, token_ms=0.35, pair_ms=1.6e-5, square_ms=1.3e-5)
    assert predicted.full_ms == pytest.approx(by_slices(TARGET, 6000, 2000, 512))
    assert predicted.sparse_ms == pytest.approx(by_slices(DRAFT, 7000, 1000, 1024) + by_slices(rest, 1600, 2000, 512))
    assert TARGET.without(replace(TARGET, token_ms=1.0)).token_ms == 0


def test_without_steps_a_prediction_takes_the_best():
    assert PAIR.predict(8000, 1600) == PAIR.predict(8000, 1600, steps=(1024, 512))


def samples_of(law: ModelCost) -> tuple[list[Sample], list[Sample]]:
    """What a calibration reads, by a law: short prompts in several steps, a long one in one, and the ends."""
    slices = [(256, s) for s in range(0, 8192, 256)] + [(1024, 0), (1024, 1024), (2048, 0)]
    forwards = [
        Sample(n, s, law.fixed_ms + law.token_ms * n + law.pair_ms * n * s + law.square_ms * n * n) for n, s in slices
    ]
    ends = [Sample(law.end_tokens, n, law.end_ms + law.end_token_ms * n) for n in (256, 1024, 2048, 8192)]
    return forwards, ends


@pytest.mark.parametrize("law", [TARGET, DRAFT])
def test_fit_finds_the_law_behind_exact_samples(law):
    found = fit(*samples_of(law))
    for name in ModelCost.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(law, name), rel=1e-6)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("law", [TARGET, DRAFT])
def test_what_other_work_slows_down_does_not_count(law, seed):
    """A third of the forwards take up to three times as long, all are off by some per cent: within 5 % of the law."""
    rng = np.random.default_rng(seed)

    def disturbed(sample: Sample) -> Sample:
        slower = rng.uniform(1.2, 3.0) if rng.random() < 1 / 3 else 1.0
        return replace(sample, ms=sample.ms * slower * rng.uniform(0.98, 1.02))

    forwards, ends = samples_of(law)
    found = fit([disturbed(sample) for sample in forwards], ends)
    for tokens in (1024, 4096, 8192, 32768):
        assert found.prefill_ms(tokens, 0, 256) == pytest.approx(law.prefill_ms(tokens, 0, 256), rel=0.05)


def test_fit_never_gives_a_negative_coefficient_and_stays_close():
    rng = np.random.default_rng(1)
    for _ in range(50):
        samples = [Sample(n, s, 0.1 * n * rng.uniform(0.8, 1.25)) for n, s in ((256, 0), (256, 256), (1024, 0))]
        found = fit(samples, [Sample(1, 256, 3.0), Sample(1, 1024, 2.0)])
        assert min(getattr(found, name) for name in ModelCost.__slots__) >= 0
        assert found.prefill_ms(1024, 0, 1024) - found.end_ms == pytest.approx(0.1 * 1023, rel=0.4)


def test_fit_refuses_nothing():
    with pytest.raises(ValueError, match="nothing was measured"):
        fit([], [])


def test_both_margins_must_be_cleared():
    assert Prediction(1000.0, 800.0).pays(POLICY)
    assert not Prediction(1000.0, 801.0).pays(POLICY)
    absolute = SpecPrefillPolicy(threshold=None, min_saving_share=Fraction(0), min_saving_ms=300.0)
    assert Prediction(1000.0, 700.0).pays(absolute)
    assert not Prediction(1000.0, 701.0).pays(absolute)


def test_break_even_is_the_first_length_that_pays():
    found = break_even(PAIR, POLICY)
    assert found is not None

    def pays(tokens: int) -> bool:
        return PAIR.predict(tokens, max(1, round(0.2 * tokens))).pays(POLICY)

    assert pays(found)
    assert not pays(found - 1)


def test_a_draft_as_slow_as_its_target_never_pays():
    assert break_even(PairCost(TARGET, TARGET, 512, 512), POLICY, longest=1 << 16) is None
