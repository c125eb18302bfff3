"""The penalty on repetitions (DRY), against its definition in llama.cpp's documentation, quadratic and without arrays.

https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md: "Tokens that extend repetition beyond this
receive exponentially increasing penalty: multiplier * base ^ (length of repeating sequence before token - allowed
length)"; breakers, and a token that is one itself, as in its source.
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlx_specprefill import InvalidRequestError, SamplingParams
from mlx_specprefill.sampling import check_sampling, logits_processors

V = 6
IDS = st.integers(0, V - 1)
BREAKERS = st.lists(st.lists(IDS, min_size=1, max_size=3).map(tuple), max_size=2).map(tuple)


def defined(text: list[int], params: SamplingParams) -> dict[int, float]:
    """Return what each token loses after a text."""
    n, allowed = params.dry_penalty_last_n, params.dry_allowed_length
    text = text if n == -1 else text[len(text) - min(n, len(text)) :]
    if len(text) <= allowed:
        return {}
    limit = len(text)
    for start in reversed(range(len(text))):
        met = [len(b) for b in params.dry_sequence_breakers if tuple(text[start : start + len(b)]) == b]
        if met:
            limit = len(text) - start - max(met)
            break
    longest: dict[int, int] = {}
    for following in range(1, len(text)):
        size = 0
        while size < min(following, limit) and text[following - 1 - size] == text[-1 - size]:
            size += 1
        if size >= allowed <= limit:
            longest[text[following]] = max(longest.get(text[following], 0), size)
    highest = 88.7228391 / math.log(params.dry_base) if params.dry_base > 1.000001 else math.inf
    return {
        token: params.dry_multiplier * params.dry_base ** min(size - allowed, highest)
        for token, size in longest.items()
        if (token,) not in params.dry_sequence_breakers
    }


def lost(text: list[int], params: SamplingParams, prompt: int = 0, size: int = V) -> list[float]:
    """Return what every token loses, if the text begins with so many tokens of the prompt."""
    (process,) = logits_processors(params, np.array(text[:prompt], dtype=np.int32))
    logits = process(mx.array(text[prompt:], dtype=mx.int32), mx.zeros((1, size)))
    return list((-np.array(logits[0])).tolist())


@given(
    text=st.lists(IDS, max_size=40) | st.lists(st.integers(0, 1), max_size=40),
    share=st.floats(0, 1),
    base=st.sampled_from([1.0, 1.0000005, 1.1, 1.75]),
    allowed=st.integers(0, 4),
    last_n=st.sampled_from([-1, 0, 1, 5, 64]),
    breakers=BREAKERS,
)
@example(text=[1] * 40, share=0.5, base=1.75, allowed=2, last_n=-1, breakers=())
@example(text=[1, 2, 3, 0, 0, 1, 2], share=0.5, base=1.75, allowed=2, last_n=5, breakers=())  # 3 lies too far back
def test_it_is_as_defined(
    text: list[int], share: float, base: float, allowed: int, last_n: int, breakers: tuple[tuple[int, ...], ...]
) -> None:
    params = SamplingParams(
        dry_multiplier=0.8,
        dry_base=base,
        dry_allowed_length=allowed,
        dry_penalty_last_n=last_n,
        dry_sequence_breakers=breakers,
    )
    check_sampling(params, V)
    wanted = defined(text, params)
    assert lost(text, params, int(share * len(text))) == pytest.approx(
        [wanted.get(token, 0.0) for token in range(V)], rel=1e-5
    )


# Shares before and after the penalty, as llama.cpp tests its own (tests/test-sampling.cpp).
@pytest.mark.parametrize(
    ("text", "after", "multiplier", "allowed", "last_n", "breakers"),
    [
        ([0, 1], [0.25] * 4, 1.0, 2, 4, ()),
        ([0, 1, 2, 0, 1], [0.296923, 0.296923, 0.109232, 0.296923], 1.0, 2, 5, ()),
        ([0, 1, 3, 4, 0, 1], [0.2] * 5, 1.0, 2, 6, ((3,),)),
        ([0, 1, 2, 0, 1], [0.241818, 0.241818, 0.032727, 0.241818, 0.241818], 2.0, 2, 5, ()),
        ([0, 1, 2, 3, 4, 0, 1], [0.2] * 5, 1.0, 4, 7, ()),
    ],
)
def test_it_does_what_llama_cpp_does(
    text: list[int],
    after: list[float],
    multiplier: float,
    allowed: int,
    last_n: int,
    breakers: tuple[tuple[int, ...], ...],
) -> None:
    params = SamplingParams(
        dry_multiplier=multiplier,
        dry_base=1.1,
        dry_allowed_length=allowed,
        dry_penalty_last_n=last_n,
        dry_sequence_breakers=breakers,
    )
    weights = np.exp(-np.array(lost(text, params, size=len(after))))
    assert (weights / weights.sum()).tolist() == pytest.approx(after, abs=1e-5)


def test_the_prompt_counts() -> None:
    params = SamplingParams(dry_multiplier=1.0)
    assert lost([1, 2, 3, 1, 2], params, prompt=5)[3] == lost([1, 2, 3, 1, 2], params, prompt=1)[3] == 1.0


def test_off_there_is_nothing_to_run() -> None:
    assert logits_processors(SamplingParams(dry_base=2.0, dry_sequence_breakers=((1,),))) == []


def test_a_long_loop_takes_no_quadratic_work_and_leaves_finite_logits() -> None:
    params = SamplingParams(dry_multiplier=100.0, dry_penalty_last_n=-1, dry_base=1.75)
    assert lost([1, 2] * 50_000, params)[1] == pytest.approx(1e30)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dry_multiplier", -0.1),
        ("dry_multiplier", math.nan),
        ("dry_base", 0.9),
        ("dry_allowed_length", -1),
        ("dry_penalty_last_n", -2),
        ("dry_sequence_breakers", ((),)),
        ("dry_sequence_breakers", ((V,),)),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        check_sampling(SamplingParams(**{field: value}), V)
