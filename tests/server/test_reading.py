from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_specprefill import Account, TokenEvent
from mlx_specprefill_server.generating.answers import (
    AnswerDone,
    CallBroken,
    CallDelta,
    CallEnd,
    CallStart,
    ReasoningDelta,
    TextDelta,
)
from mlx_specprefill_server.generating.deltas import Delta, Stops
from mlx_specprefill_server.generating.generation import Done
from mlx_specprefill_server.generating.reading import AnswerReader
from mlx_specprefill_server.parsers.formats import Format

from .parsers.reading import THINK, TOOLS

CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


def reader(stops: tuple[str, ...] = (), parallel: bool = True, forced: bool = False) -> AnswerReader:
    return AnswerReader(3, Format("hermes", THINK).parser(TOOLS, ""), Stops(stops), parallel, forced)


def deltas(words: Sequence[str]) -> list[Delta]:
    """Every word is a token."""
    out, at = [], 0
    for number, word in enumerate(words):
        out.append(Delta(3, word, (TokenEvent(number),), (at,), at + len(word), number + 1))
        at += len(word)
    return out


def answer(words: Sequence[str], reason: str = "stop", **options: object) -> tuple[list[object], AnswerDone]:
    """All pieces but the last, and the last."""
    one = reader(**options)
    pieces: list[object] = []
    count = 0
    for delta in deltas(words):
        pieces += one.push(delta)
        count = delta.completion_tokens
        if one.over:
            reason = "stop"
            break
    *rest, last = one.finish(Done(3, reason, count, Account("full", "", 1, 1)))
    assert isinstance(last, AnswerDone)
    assert all(piece.index == 3 for piece in [*pieces, *rest, last])
    return [*pieces, *rest], last


def text_of(pieces: Sequence[object]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, TextDelta))


def test_calls_are_numbered_and_end_with_all_their_arguments() -> None:
    pieces, end = answer(["I ask.\n", CALL[:50], CALL[50:], "\n", CALL])
    starts = [piece for piece in pieces if isinstance(piece, CallStart)]
    assert [(start.call, start.name) for start in starts] == [(0, "get_weather"), (1, "get_weather")]
    assert len({start.id for start in starts}) == 2
    assert all(start.id.startswith("call_") for start in starts)
    for number in (0, 1):
        written = "".join(p.text for p in pieces if isinstance(p, CallDelta) and p.call == number)
        ends = [piece.arguments for piece in pieces if isinstance(piece, CallEnd) and piece.call == number]
        assert ends == [written] == ['{"city": "Paris"}']
    assert text_of(pieces) == "I ask."
    assert end.finish_reason == "tool_calls"


def test_a_broken_call_takes_its_number_with_it_and_its_text_comes_back() -> None:
    bad = '<tool_call>{"name": "get_weather", "arguments": {"days": 1, x'
    pieces, end = answer([CALL, bad])
    assert [piece for piece in pieces if isinstance(piece, CallBroken)] == [CallBroken(3, 1)]
    assert text_of(pieces) == bad
    assert end.finish_reason == "tool_calls"
    pieces, end = answer([bad])
    assert (text_of(pieces), end.finish_reason) == (bad, "stop")


def test_an_answer_that_is_cut_off_ends_for_its_length_also_after_a_call() -> None:
    _, end = answer([CALL, "<tool_call>{"], reason="length")
    assert end.finish_reason == "length"


def test_without_parallel_calls_the_first_ends_the_answer() -> None:
    pieces, end = answer([CALL[:40], CALL[40:] + CALL, CALL], parallel=False)
    assert sum(isinstance(piece, CallStart) for piece in pieces) == 1
    assert end.finish_reason == "tool_calls"
    assert end.completion_tokens == 2


ROME = CALL.replace("Paris", "Rome")
OTHER_ORDER = '{"name": "get_weather", "arguments": {"days": 1, "city": "Paris"}}</tool_call>'
ORDERED = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("words", "cities"),
    [
        ([CALL, "\n", CALL, "\n", CALL], ["Paris"]),
        ([CALL, "\n", ROME, "\n", CALL, "\n", ROME], ["Paris", "Rome"]),
        ([CALL[:40], CALL[40:] + "\n" + ROME[:40], ROME[40:], "\n", ROME], ["Paris", "Rome"]),
        (["<tool_call>" + ORDERED, "<tool_call>" + OTHER_ORDER], ["Paris"]),
    ],
)
def test_forced_calls_are_complete_when_one_comes_again(words: list[str], cities: list[str]) -> None:
    pieces, end = answer(words, reason="length", forced=True)
    assert [json.loads(piece.arguments)["city"] for piece in pieces if isinstance(piece, CallEnd)] == cities
    assert sum(isinstance(piece, CallStart) for piece in pieces) == len(cities)
    assert (end.finish_reason, text_of(pieces)) == ("tool_calls", "")


@pytest.mark.parametrize("half", [ROME[:20], ROME[:60], ROME[:-3], "\n<tool"])
def test_no_half_call_is_left_in_the_text_of_a_forced_answer(half: str) -> None:
    for before in ([], [CALL + "\n"]):
        pieces, end = answer([*before, half], reason="length", forced=True)
        assert text_of(pieces) == ""
        assert sum(isinstance(piece, CallEnd) for piece in pieces) == len(before) + (half == ROME[:-3])
        assert end.finish_reason == "length"


def test_stop_strings_are_looked_for_in_visible_text_only() -> None:
    pieces, end = answer(["<think>", "END ", "of it", "</think>", "a E", "ND b", "c"], stops=("END",))
    assert "".join(p.text for p in pieces if isinstance(p, ReasoningDelta)) == "END of it"
    assert (text_of(pieces), end.stop_string, end.finish_reason) == ("a ", "END", "stop")
    assert end.completion_tokens == 6
    pieces, end = answer([CALL.replace("Paris", "END")], stops=("END",))
    assert (end.finish_reason, end.stop_string) == ("tool_calls", None)


def test_the_beginning_of_a_stop_string_is_shown_when_a_call_follows() -> None:
    pieces, _ = answer(["a EN", "\n" + CALL], stops=("END",))
    assert text_of(pieces) == "a EN"
    assert isinstance(pieces[-1], CallEnd)


def test_reasoning_tokens_are_counted_with_their_tags() -> None:
    _, end = answer(["<think>", "Two ", "words.", "</think>", "\n\n", "Yes", "."])
    assert (end.reasoning_tokens, end.completion_tokens) == (4, 7)
    _, end = answer(["<think>", "Two ", "words."], reason="length")
    assert end.reasoning_tokens == 3
    _, end = answer(["Yes", "."])
    assert end.reasoning_tokens == 0


def test_tokens_travel_with_the_part_of_the_answer_that_they_begin() -> None:
    pieces, _ = answer(["<think>", "Hm", ".", "</think>", "\n\nYes", " E", "N", "!", "\n", CALL], stops=("END",))
    thought = [token.token for p in pieces if isinstance(p, ReasoningDelta) for token in p.tokens]
    said = [token.token for p in pieces if isinstance(p, TextDelta) for token in p.tokens]
    assert (thought, said) == ([1, 2], [4, 5, 6, 7])


@given(
    words=st.lists(st.sampled_from(["a", " b", "EN", "D", "\n", "<think>", "</think>", "<", CALL, "<tool_call>{"])),
    stops=st.sampled_from([(), ("END",), ("b<", "D")]),
)
def test_tokens_are_those_of_the_text(words: list[str], stops: tuple[str, ...]) -> None:
    """A token beside visible text begins in it, or at the white space before it; none comes twice or out of order."""
    pieces, _ = answer(words, stops=stops)
    for piece in pieces:
        if isinstance(piece, TextDelta | ReasoningDelta):
            for token in piece.tokens:
                assert words[token.token].strip() == "" or any(char in piece.text for char in words[token.token])
    numbers = [t.token for p in pieces if isinstance(p, TextDelta | ReasoningDelta) for t in p.tokens]
    assert numbers == sorted(set(numbers))
    shown = "".join(p.text for p in pieces if isinstance(p, TextDelta | ReasoningDelta))
    if not any(isinstance(piece, CallStart) for piece in pieces):
        beside = "".join(words[number] for number in numbers)
        assert shown.replace("\n", "") in beside.replace("\n", "")


def test_the_end_says_what_failed() -> None:
    one = reader()
    one.push(deltas(["<tool_call>{"])[0])
    error = RuntimeError("broken")
    *rest, end = one.finish(Done(3, "length", 1, Account("full", "", 1, 1), error))
    assert text_of(rest) == "<tool_call>{"
    assert (end.error, end.finish_reason) == (error, "length")


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_empty_answer_has_only_an_end(reason: str) -> None:
    assert answer([], reason=reason)[0] == []
