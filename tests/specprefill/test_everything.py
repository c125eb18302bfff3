"""Which questions are about all of a text, by their words."""

from __future__ import annotations

import pytest

from mlx_specprefill.specprefill.plan import about_everything


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("How many ships are mentioned?", "How many"),
        ("How often does the author say so?", "How often"),
        ("Summarize the text above.", "Summarize"),
        ("Please give me a summary.", "summary"),
        ("List all ports that are named.", "List all"),
        ("Which word is most frequent?", "most frequent"),
        ("Translate the letter into French.", "Translate the"),
        ("Rewrite this file with type hints.", "Rewrite this"),
        ("What are the main points?", "main points"),
        ("Count the errors.", "Count"),
        ("What does the whole story tell us?", "whole"),
    ],
)
def test_a_question_about_everything_says_so(question: str, words: str) -> None:
    assert about_everything(question) == words


@pytest.mark.parametrize(
    "question",
    [
        "What is the secret code for Emma?",
        "What is the account number of Eleanor?",  # "count" in a word
        "When did the accountant leave?",
        "Which of the two did he list first?",
        "Who wrote the summons?",
        "Where is the editor's office?",
    ],
)
def test_other_questions_do_not(question: str) -> None:
    assert about_everything(question) is None
