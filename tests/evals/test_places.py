"""Every place and kind of document: the question is where the place says, the text holds its answer once."""

from functools import cache

import pytest

from mlx_specprefill_evals.errors import NotMeasuredError
from mlx_specprefill_evals.tasks import TASKS, Item, Space, asked_documents, make_item
from mlx_specprefill_evals.tasks.around_questions import PLACES


def count(text: str) -> int:
    return -(-len(text) // 3)


@cache
def item(place: str, number: int) -> Item:
    return make_item(TASKS[f"place_{place}"], f"place_{place}", number, Space(1200, count))


def said(made: Item) -> list[str]:
    return [made.system, *(turn.question for turn in made.turns)]


@pytest.mark.parametrize("kind", asked_documents.KINDS)
def test_every_place_holds_the_same_document_and_question(kind: str) -> None:
    number = list(asked_documents.KINDS).index(kind)
    question = item("turn_after", number).turns[1].question
    for place in PLACES:
        made = item(place, number)
        text = "\n".join(said(made))
        assert text.count(question) == (2 if place == "both" else 1)
        assert text.count(made.gold[0]) == 1
        assert made.values[0] in made.gold[0]
        assert made.gold == item("end", number).gold
        assert made.turns[-1].answer == made.values[0]


def test_the_question_stands_where_the_place_says() -> None:
    question = item("turn_after", 3).turns[1].question
    asked = {place: [question in text for text in said(item(place, 3))] for place in PLACES}
    assert asked["system"] == asked["system_and_rules"] == [True, False]
    assert asked["turn_before"] == [False, True, False]
    assert asked["before_edit_rules"] == [False, False, True]
    for place in ("front", "front_of_file", "front_of_fence", "front_and_rules", "in_a_query"):
        made = item(place, 3)
        assert made.turns[0].question.index(question) < made.turns[0].question.index(made.gold[0])
    text = item("between", 3).turns[0].question
    assert 0.4 < text.index(question) / len(text) < 0.6


def test_numbers_take_the_kinds_in_turn_and_ask_something_else_each_time() -> None:
    asked = [item("turn_after", number).turns[1].question for number in range(12)]
    assert len(set(asked)) == 12
    assert item("turn_after", 1).gold[0].endswith("fünf Jahre.")
    assert item("turn_after", 4).gold[0].startswith("U+")
    assert item("turn_after", 5).gold[0].startswith('{"module"')


def test_a_text_of_another_version_is_not_measured() -> None:
    with pytest.raises(NotMeasuredError, match="in 0 places"):
        asked_documents._known(("other text",), "said|asked?|value", 0)


def test_every_question_on_a_fixed_text_has_its_answer() -> None:
    for number, row in enumerate(asked_documents._GERMAN.splitlines()):
        asked = asked_documents._german(None, number, 0)
        assert row.rsplit("|", 1)[1] in asked.gold
    found = [number for number in range(len(asked_documents._ENGLISH.splitlines())) if _is_there(number)]
    assert len(found) >= 5  # versions of Python word some of it differently


def _is_there(number: int) -> bool:
    try:
        asked = asked_documents._prose(None, number, 0)
    except NotMeasuredError:
        return False
    return asked.value in asked.gold


@pytest.mark.parametrize("kind", asked_documents.KINDS)
def test_an_order_stands_beside_a_document_that_asks(kind: str) -> None:
    number = list(asked_documents.KINDS).index(kind)
    for place in PLACES:
        made = make_item(TASKS[f"order_{place}"], f"order_{place}", number, Space(1200, count, number=number))
        text = "\n".join(said(made))
        assert len([line for line in text.splitlines() if line.rstrip('",}').endswith("?")]) >= 6
        assert "Answer this from the text: " in text
        assert made.gold[0] in text
