"""Facts and filler: what is asked is in the pieces, the values are in the answer, the words are held out."""

import random
import re
import zlib
from collections.abc import Callable
from functools import partial

import pytest

from mlx_specprefill_evals import facts, haystack, words
from mlx_specprefill_evals.aggregates import occurrences
from mlx_specprefill_evals.facts import Fact, uuid

KINDS: dict[str, Callable[[random.Random], Fact]] = {
    "number_needle": facts.number_needle,
    "uuid_needle": facts.uuid_needle,
    "record": partial(facts.record, number=123_456),
    "three_records": partial(facts.three_records, numbers=(123_456, 234_567, 345_678)),
    "order": facts.order,
    "rule_and_exception": facts.rule_and_exception,
    "foreign_needle": facts.foreign_needle,
    "tagged_list": facts.tagged_list,
    "latest_value": facts.latest_value,
    "tool": facts.tool,
}


def count(text: str) -> int:
    return -(-len(text) // 3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_restates_the_pieces_and_holds_every_value(kind: str) -> None:
    rng = random.Random(3)
    for _ in range(40):
        fact = KINDS[kind](rng)
        assert fact.values
        assert all(value in fact.turn.answer for value in fact.values)
        answer = re.sub(r"(?:Id|first|second|third) (?=\d)", '{"id": ', re.sub(r"^For [^:]*: ", "", fact.turn.answer))
        restated = answer.replace("/>", "/>. ").replace("; {", ". {").split(". ")
        assert all(any(part.strip(". ") in piece for piece in fact.pieces) for part in restated)
        assert not any(value in fact.turn.question for value in fact.values if value.isdigit() and len(value) > 3)


def test_occurrences_are_as_many_as_the_answer_says() -> None:
    for seed in range(20):
        whole = occurrences(random.Random(seed), 3000, count)
        assert whole.document.count(whole.passages[0]) == int(whole.values[0]) >= 3


def test_uuids_are_version_4() -> None:
    assert all(uuid(random.Random(seed))[14] == "4" and uuid(random.Random(seed))[19] in "89ab" for seed in range(50))


def test_the_demo_pairs_were_trained_on_no_invented_word() -> None:
    rng = random.Random(0)
    assert all(zlib.crc32(words.invented_word(rng).encode()) % words.HELD_OUT_SHARE == 0 for _ in range(200))


@pytest.mark.parametrize("kind", sorted(haystack.FILLERS))
def test_filler_leaves_no_slot_open(kind: str) -> None:
    rng = random.Random(0)
    pieces = [haystack.FILLERS[kind](rng) for _ in range(100)]
    assert all(piece.strip() for piece in pieces)
    assert kind == "code" or not any("{" in piece for piece in pieces)
