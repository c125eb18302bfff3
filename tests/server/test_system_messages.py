from __future__ import annotations

import pytest

from mlx_specprefill_server.prompt.conversation import Message, inline_system_messages

LETTERS = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}


def messages(short: str) -> list[Message]:
    """ "s1 u2" as messages."""
    return [{"role": LETTERS[word[0]], "content": word} for word in short.split()]


def shown(given: list[Message]) -> str:
    """The other way round, with R(...) for a reminder."""
    words = [f"{message['role'][0]}:{message['content']}" for message in given]
    text = " ".join(words).replace("\n\n</", "\n</")
    return text.replace("<system-reminder>\n", "R(").replace("\n</system-reminder>", ")").replace("\n\n", "+")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("s1 u2 a3 u4", "s:s1 u:u2 a:a3 u:u4"),
        ("s1 d2 u3", "s:s1 d:d2 u:u3"),
        ("u1 s2", "u:R(s2)+u1"),
        ("u1 s2 d3 a4", "u:R(s2+d3)+u1 a:a4"),
        ("u1 a2 s3 u4", "u:u1 a:a2 u:R(s3)+u4"),
        ("u1 a2 t3 s4", "u:u1 a:a2 t:t3 u:R(s4)"),
        ("u1 a2 t3 s4 a5 u6", "u:u1 a:a2 t:t3 u:R(s4) a:a5 u:u6"),
        ("s1", "s:s1"),
        ("", ""),
    ],
)
def test_system_messages_stay_where_they_are(given: str, expected: str) -> None:
    assert shown(inline_system_messages(messages(given))) == expected


def test_a_later_system_message_leaves_the_beginning_as_it_was() -> None:
    turns = "s1 u2 a3 u4 s5 a6 t7 s8 a9 u10".split()
    whole = inline_system_messages(messages(" ".join(turns)))
    for length in (3, 6, 9):  # whenever the assistant has answered
        part = inline_system_messages(messages(" ".join(turns[:length])))
        assert whole[: len(part)] == part
