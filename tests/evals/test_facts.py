"""Facts and filler: what is asked is in the pieces, the values are in the answer, the words are held out."""

import random
import zlib
from collections.abc import Callable

import pytest

from mlx_specprefill_evals import facts, haystack, words
from mlx_specprefill_evals.facts import Fact


@pytest.mark.parametrize("kind", [facts.number_needle, facts.tool])
def test_the_answer_restates_the_text_and_the_question_has_no_value(kind: Callable[[random.Random], Fact]) -> None:
    rng = random.Random(3)
    for _ in range(40):
        fact = kind(rng)
        assert fact.value in fact.turn.answer == fact.text
        assert fact.value not in fact.turn.question


def test_the_demo_pairs_were_trained_on_no_invented_word() -> None:
    rng = random.Random(0)
    assert all(zlib.crc32(words.invented_word(rng).encode()) % words.HELD_OUT_SHARE == 0 for _ in range(200))


@pytest.mark.parametrize("kind", sorted(haystack.FILLERS))
def test_filler_leaves_no_slot_open(kind: str) -> None:
    rng = random.Random(0)
    pieces = [haystack.FILLERS[kind](rng) for _ in range(100)]
    assert all(piece.strip() for piece in pieces)
    assert kind == "code" or not any("{" in piece for piece in pieces)
