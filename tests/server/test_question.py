"""Which questions are about all of a text, by their words."""

from __future__ import annotations

import pytest

from mlx_specprefill_server.prompt.question import about_everything, question_in


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


STORY = "It sank. " * 99


@pytest.mark.parametrize(
    ("message", "first", "last"),
    [
        ("Why?", "Why?", "Why?"),
        (f"Count it.\n{STORY}\nWho was it?", "Count it.", f"{STORY}\nWho was it?"[-64:]),  # a short line and before it
        ("x" * 400, "x" * 128, "x" * 64),  # one line without a beginning near its end
        ("a\n" * 99 + "b" * 100, "a", "b" * 100),  # a last line of some length
        ("c" * 99 + "。" + "d" * 99, "c" * 99 + "。" + "d" * 28, "d" * 99),
        (f"Who?\n\n{STORY}\n\n", "Who?", STORY.rstrip()[-64:]),
        ("", "", ""),
    ],
)
def test_the_question_is_the_first_line_and_the_last_line_or_sentence(message: str, first: str, last: str) -> None:
    assert question_in(message) == f"{first}\n{last}"


def test_words_in_the_middle_of_a_message_ask_nothing() -> None:
    middle = "The ship left. " * 20 + "Summarize it. " + "It met nobody. " * 20
    assert about_everything(f"{middle}\nWhere did it go?") is None
    assert about_everything(f"Summarize it.\n{middle}\nBe brief.") == "Summarize"
    assert about_everything(f"{middle}\nSummarize it.") == "Summarize"
