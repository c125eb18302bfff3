"""Facts and whole documents: what is asked is in the document, the values are in the answer, the split is kept."""

import random
import re

import pytest

from mlx_specprefill_evals.aggregates import AGGREGATES
from mlx_specprefill_evals.facts import FACTS, uuid


def count(text: str) -> int:
    return -(-len(text) // 3)


@pytest.mark.parametrize("kind", sorted(FACTS))
def test_the_answer_restates_the_pieces_and_holds_every_value(kind: str) -> None:
    rng = random.Random(3)
    for held_out in (False, True) * 20:
        fact = FACTS[kind](rng, held_out)
        assert fact.values
        assert all(value in fact.turn.answer for value in fact.values)
        answer = re.sub(r"(?:Id|first|second|third) (?=\d)", '{"id": ', re.sub(r"^For [^:]*: ", "", fact.turn.answer))
        restated = answer.replace("/>", "/>. ").replace("; {", ". {").split(". ")
        assert all(any(part.strip(". ") in piece for piece in fact.pieces) for part in restated)
        assert not any(value in fact.turn.question for value in fact.values if value.isdigit() and len(value) > 3)


@pytest.mark.parametrize("kind", sorted({*FACTS, *AGGREGATES}))
def test_the_seed_decides(kind: str) -> None:
    if kind in FACTS:
        one, same, other = (FACTS[kind](random.Random(seed), True) for seed in (1, 1, 2))
        assert one == same != other
    else:
        a, b, c = (AGGREGATES[kind](random.Random(seed), 700, count, True) for seed in (1, 1, 2))
        assert a == b != c


@pytest.mark.parametrize("kind", sorted(set(FACTS) - {"uuid_key", "record"}))
def test_training_and_evaluation_share_no_subject(kind: str) -> None:
    sides = []
    for held_out in (False, True):
        rng = random.Random(int(held_out))
        sides.append({FACTS[kind](rng, held_out).turn.question for _ in range(150)})
    assert not sides[0] & sides[1]


@pytest.mark.parametrize("length", [600, 4000, 20_000])
def test_common_words_are_the_most_common(length: int) -> None:
    whole = AGGREGATES["common_words"](random.Random(7), length, count, True)
    listed = [line.split(". ")[1] for line in whole.document.split("\n")]
    counts = {word: listed.count(word) for word in set(listed)}
    ranked = sorted(counts, key=counts.__getitem__, reverse=True)
    assert set(ranked[: len(whole.values)]) == set(whole.values)
    assert len(whole.values) == (10 if length == 20_000 else 3)
    assert 0.4 * length < count(whole.document) <= length


@pytest.mark.parametrize("length", [600, 4000])
def test_frequent_words_are_in_order_and_distinct(length: int) -> None:
    whole = AGGREGATES["frequent_words"](random.Random(7), length, count, True)
    stream = whole.document.split()
    counts = [stream.count(word) for word in whole.values]
    assert counts[0] > counts[1] > counts[2] > max(stream.count(w) for w in set(stream) - {*whole.values, "..."})
    assert stream.count("...") > counts[0]
    assert 0.4 * length < count(whole.document) <= length


def test_occurrences_are_as_many_as_the_answer_says() -> None:
    for seed in range(20):
        whole = AGGREGATES["occurrences"](random.Random(seed), 3000, count, True)
        assert whole.document.count(whole.passages[0]) == int(whole.values[0]) >= 3


def test_uuids_are_version_4() -> None:
    assert all(uuid(random.Random(seed))[14] == "4" and uuid(random.Random(seed))[19] in "89ab" for seed in range(50))
