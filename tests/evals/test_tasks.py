"""Every task at several lengths: what is asked is there, the right answer scores 1, a wrong one 0, it fits."""

from functools import cache

import pytest

from mlx_specprefill_evals.suite import all_values
from mlx_specprefill_evals.tasks import PLACE_TASKS, TASKS, Item, Space, make_item
from mlx_specprefill_evals.tasks.ruler import RULER

SOME_PLACES = {"place_end", "place_turn_before", "place_between"}  # all of them: test_places
NAMES = sorted(TASKS.keys() - RULER.keys() - PLACE_TASKS.keys() | SOME_PLACES)


def count(text: str) -> int:
    return -(-len(text) // 3)


@cache
def item(name: str, seed: int = 0, length: int = 2500) -> Item:
    return make_item(TASKS[name], name, seed, Space(length, count))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.nightly
def test_the_gold_answer_scores_one_and_another_items_answer_does_not(name: str) -> None:
    for seed in range(3):
        one, other = item(name, seed), item(name, seed + 50)
        assert all_values(one.turns[-1].answer, one.values) == 1
        assert all_values("", one.values) == 0
        if one.values != other.values:
            assert all_values(other.turns[-1].answer, one.values) < 1


@pytest.mark.parametrize("name", NAMES)
def test_gold_passages_are_in_the_document_once(name: str) -> None:
    for seed in range(3):
        made = item(name, seed)
        document = "\n".join(turn.question for turn in made.turns)
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
