"""Memory of texts has a bound in bytes, goes by use, and does not come back once it is forgotten."""

from __future__ import annotations

import time

import numpy as np
import pytest

from mlx_specprefill.remembered import Remembered

LIMIT = 1000


def refuse(text: str) -> str:
    raise ValueError(text)


@pytest.mark.parametrize("seed", range(5))
def test_the_last_used_results_stay_within_the_limit(seed: int) -> None:
    rng, made, kept = np.random.default_rng(seed), list[str](), list[str]()
    sizes = {f"text {i}": int(rng.integers(1, 1200)) for i in range(12)}

    def make(text: str) -> str:
        made.append(text)
        return text.upper()

    remembered = Remembered(make, sizes.__getitem__, LIMIT)
    for text in rng.choice([*sizes], 300).tolist():
        made.clear()
        assert remembered(text) == text.upper()
        assert made == [text] * (text not in kept)
        if sizes[text] <= LIMIT:
            kept = [text, *(other for other in kept if other != text)]
        while sum(map(sizes.__getitem__, kept)) > LIMIT:
            kept.pop()
        assert remembered.nbytes == sum(map(sizes.__getitem__, kept))


def test_an_error_is_not_remembered() -> None:
    remembered = Remembered(refuse, len, LIMIT)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            remembered("no")
    assert remembered.nbytes == 0


def test_nothing_stays_of_what_came_before_it_was_forgotten() -> None:
    remembered, before = Remembered(str.upper, len, LIMIT), time.monotonic()
    during = Remembered[None](lambda _: during.forget(), len, LIMIT)
    remembered("a")
    remembered.forget()
    remembered("a", before)
    during("b")
    assert remembered.nbytes == during.nbytes == 0
    remembered("a")
    assert remembered.nbytes == 1
    remembered("a", before)
    assert remembered.nbytes == 0
