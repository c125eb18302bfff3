"""Every task at several lengths: what is asked is there, the right answer scores 1, a wrong one 0, it fits."""

import json
import re
from functools import cache

import pytest

from mlx_specprefill_evals.tasks import PLACE_TASKS, TASKS, Item, Space, make_item
from mlx_specprefill_evals.tasks.ruler import RULER

SOME_PLACES = {"place_end", "place_turn_before", "place_between"}  # all of them: test_places
NAMES = sorted(TASKS.keys() - RULER.keys() - PLACE_TASKS.keys() | SOME_PLACES)


def count(text: str) -> int:
    return -(-len(text) // 3)


@cache
def item(name: str, seed: int = 0, length: int = 2500, depth: float | None = None) -> Item:
    return make_item(TASKS[name], name, seed, Space(length, count, depth))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.nightly
def test_the_gold_answer_scores_one_and_another_items_answer_does_not(name: str) -> None:
    task = TASKS[name]
    for seed in range(3):
        one, other = item(name, seed), item(name, seed + 50)
        assert task.score(one.turns[-1].answer, one.values) == 1
        assert task.score("", one.values) == 0
        if one.values != other.values:
            assert task.score(other.turns[-1].answer, one.values) < 1


@pytest.mark.parametrize("name", NAMES)
def test_gold_passages_are_in_the_document_once(name: str) -> None:
    for seed in range(3):
        made = item(name, seed)
        document = "\n".join(turn.question for turn in made.turns)
        assert all(passage in document for passage in made.gold)
        if name not in ("counting", "order_tracking"):
            assert all(document.count(passage) == 1 for passage in made.gold)
        assert made.gold


@pytest.mark.parametrize("length", [1200, 6000])
@pytest.mark.parametrize("name", NAMES)
def test_prompts_fill_their_length_and_fit(name: str, length: int) -> None:
    made = item(name, 1, length)
    size = sum(count(text) for text in (made.system, *(turn.question for turn in made.turns)))
    assert 0.5 * length < size <= length
    assert count(made.turns[-1].answer) <= 2 * TASKS[name].answer_tokens


@pytest.mark.parametrize("name", NAMES)
def test_the_number_and_the_length_decide(name: str) -> None:
    assert item(name, 1) == item.__wrapped__(name, 1)
    assert len({item(name, 1), item(name, 2), item(name, 1, 3000)}) == 3


@pytest.mark.parametrize("name", [name for name in NAMES if TASKS[name].has_depth])
@pytest.mark.parametrize("depth", [0.1, 0.9])
def test_depth_places_what_is_asked_for(name: str, depth: float) -> None:
    made = item(name, 1, 6000, depth)
    document = made.turns[0].question
    assert document.index(made.gold[0]) / len(document) == pytest.approx(depth, abs=0.08)


def test_records_are_at_most_eighty_and_three_are_asked_for() -> None:
    for length, records in ((2500, range(5, 80)), (30_000, range(80, 81))):
        made = item("json", 0, length)
        ids = re.findall(r'"id": (\d+)', made.turns[0].question)
        assert len(ids) == len(set(ids)) in records
        question = made.turns[0].question.rsplit("\n\n", 1)[1]
        asked = re.findall(r"\w+ (\d+), its (\w+)", question)
        assert len(asked) == 3
        stored = {str(record["id"]): record for record in map(json.loads, made.gold)}
        assert made.values == tuple(str(stored[number][field]) for number, field in asked)


def test_the_module_has_one_bug() -> None:
    made = item("code_bug", 0, 30_000)
    functions = made.turns[0].question.split("\n\n\n")
    assert functions.count(made.gold[0]) == 1
    wrong = [f for f in functions if re.search(r"len\(rows\)\]|one - other|divide\(parts|= client\.get|seen=\[\]", f)]
    assert wrong == list(made.gold)


def test_the_second_turn_asks_for_another_needle() -> None:
    made = item("two_turns")
    assert len(made.turns) == 2
    assert made.turns[0].answer in made.turns[0].question
    assert made.turns[0].answer != made.turns[1].answer == made.gold[0]
    assert "\n\n" not in made.turns[1].question
