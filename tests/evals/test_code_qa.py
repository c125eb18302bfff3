"""Questions about code: each has one place in this Python's source, and an answer that does not give itself away."""

import pytest

from mlx_specprefill_evals import corpus
from mlx_specprefill_evals.tasks import TASKS, Space, make_item
from mlx_specprefill_evals.tasks.code_qa import QUESTIONS, Question

SOURCES = {module.name: module.source for module in corpus.modules()}


def test_there_are_forty_questions_at_least() -> None:
    assert len(QUESTIONS) == len({question.answer for question in QUESTIONS}) >= 40


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.answer)
def test_the_question_does_not_name_its_answer(question: Question) -> None:
    assert question.answer.lower() not in question.asked.lower()


def test_most_answers_are_in_this_python() -> None:
    """Modules change between versions. A question without its answer is skipped with a message."""
    assert sum(bool(question.line(SOURCES.get(question.module, ""))) for question in QUESTIONS) >= 40


def test_each_number_asks_another_question_at_another_depth() -> None:
    items = [
        make_item(TASKS["code_qa"], "code_qa", number, Space(1000, len, None)) for number in (0, 1, len(QUESTIONS))
    ]
    assert len({item.turns[0].question for item in items}) == 3
    assert items[0].values == items[2].values != items[1].values
