"""Which questions are about all of a text, by their words."""

from __future__ import annotations

import pytest

from mlx_specprefill_server.prompt.whole_or_part import about_everything, is_asked, question_in


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


FORM = "Use this format:\n\n## Goal\n[What is wanted?]\n" + "## More\n" * 99 + "\nKeep exact paths and error messages."


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("The messages above are a conversation to summarize. Create a checkpoint.", "summarize"),
        ("The messages above are NEW messages to add to the existing summary.", "summary"),
        ("This is the PREFIX of a turn. Summarize it to give context for what is retained.", "Summarize"),
    ],
)
def test_a_session_as_text_is_summarised_as_a_whole(order: str, words: str) -> None:
    """As pi and opencode compact: the order is neither in the first line nor in the last, maybe behind a summary."""
    said = "[User]: Fix it.\n\n[Tool result]: nothing to see\n\n" * 999
    assert about_everything(f"<conversation>\n{said}\n</conversation>\n\n{order}\n\n{FORM}") == words
    assert about_everything(f"<conversation>\n<prior-summary>\n{said}\n</prior-summary>\n{order}\n\n{FORM}") == words
    assert about_everything(f"{said}\n\nFix it.\n\n{FORM}") is None
    assert about_everything(f"<conversation>\n{said}\n</conversation>\n\nFix it.\n\n{FORM}") is None


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


ASKING = "Who sank? Nobody knew. " * 60  # a text that asks questions of its own
TELLING = "The ship left the harbour. " * 60


@pytest.mark.parametrize(
    ("messages", "asked"),
    [
        ((f"{TELLING}\nWhere did it go?",), True),
        ((f"Find the ship that sank.\n{TELLING}",), True),
        ((f"{TELLING}\n\nPlease tell me who left.\n- Be brief.\n- Use no lists.",), True),
        ((f"{TELLING}\nFrage: wer fuhr ab？\n{TELLING}",), True),  # the only question of a text
        ((f"{TELLING}\nTask: name the harbour\n",), True),
        (("Answer from the text alone.", TELLING), True),
        ((f"Rewrite it.\n{TELLING}",), False),
        ((f"{TELLING}\nПерепиши понятнее",), False),
        ((f"{TELLING}\n{ASKING}\n{TELLING}",), False),
        ((f"{TELLING}\n    list = what + who\n",), False),
        ((), False),
    ],
)
def test_a_part_is_asked_for_by_a_question_or_by_an_order_other_than_to_work_on_it(
    messages: tuple[str, ...], asked: bool
) -> None:
    assert is_asked(messages) is asked


def test_no_word_begins_where_a_message_is_cut() -> None:
    """The last 512 characters begin with what would be an order at the beginning of a line."""
    end = "who have worked on it. ".ljust(512, "x")
    assert not is_asked([f"{'x' * 600} and people {end}"])
    assert is_asked([f"{'x' * 600} and people\n{end}"])
