from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_specprefill import Failed, Finished, PrefillReport, TokenEvent
from mlx_specprefill_server.deltas import (
    AnswerDone,
    CallBroken,
    CallDelta,
    CallEnd,
    CallStart,
    ReasoningDelta,
    TextDelta,
)
from mlx_specprefill_server.generation.reader import (
    AnswerReader,
    IncrementalDetokenizer,
    StopMatcher,
    Vocabulary,
)
from mlx_specprefill_server.notations.formats import Format, plain_text

from .fakes import byte_tokenizer
from .parsers.reading import THINK, TOOLS

REPORT = PrefillReport("full", "", 1, 1)
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


def reader(words: Sequence[str], stops: tuple[str, ...] = (), **options: bool) -> AnswerReader:
    """Token `i` is `words[i]`."""
    detokenizer = IncrementalDetokenizer(lambda tokens: "".join(words[token] for token in tokens))
    parser = Format("hermes", THINK).parser(TOOLS, "")
    return AnswerReader(detokenizer, parser, StopMatcher(stops), with_tokens=True, **options)


def answer(words: Sequence[str], reason: Any = "stop", **options: Any) -> tuple[list[object], AnswerDone]:
    """All deltas but the last, and the last. The engine is cancelled when the answer is over."""
    one = reader(words, **options)
    deltas: list[object] = []
    for number in range(len(words)):
        deltas += one.push(TokenEvent(number))
        if one.over:
            reason = "cancelled"
            break
    *rest, last = one.finish(Finished(reason, one.completion_tokens, REPORT), REPORT)
    assert isinstance(last, AnswerDone)
    return [*deltas, *rest], last


def text_of(deltas: Sequence[object]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))


@given(st.lists(st.sampled_from([*"abc <\n", "<think>", "</think>", CALL, CALL[:20]]), max_size=12))
def test_text_that_nothing_has_to_be_looked_for_in_is_the_same(words: list[str]) -> None:
    def deltas(stops: tuple[str, ...]) -> list[object]:
        detokenizer = IncrementalDetokenizer(lambda tokens: "".join(words[token] for token in tokens))
        one = AnswerReader(detokenizer, Format("hermes", THINK).parser(TOOLS, ""), StopMatcher(stops))
        read = [delta for number in range(len(words)) for delta in one.push(TokenEvent(number))]
        read += one.finish(Finished("stop", len(words), REPORT), REPORT)
        return [replace(delta, start=0) if isinstance(delta, TextDelta) else blank(delta) for delta in read]

    assert deltas(()) == deltas(("not there",))


def blank(delta: Any) -> object:
    """Without the random number of a call."""
    return replace(delta, id="") if isinstance(delta, CallStart) else delta


def test_calls_come_one_after_the_other_and_end_with_all_their_arguments() -> None:
    deltas, end = answer(["I ask.\n", CALL[:50], CALL[50:], "\n", CALL])
    starts = [delta for delta in deltas if isinstance(delta, CallStart)]
    assert [start.name for start in starts] == ["get_weather", "get_weather"]
    assert len({start.id for start in starts}) == 2
    assert all(start.id.startswith("call_") for start in starts)
    second = deltas.index(starts[1])
    for call in (deltas[:second], deltas[second:]):
        written = "".join(d.text for d in call if isinstance(d, CallDelta))
        assert [d.arguments for d in call if isinstance(d, CallEnd)] == [written] == ['{"city": "Paris"}']
    assert text_of(deltas) == "I ask."
    assert end.finish_reason == "tool_calls"


def test_the_text_of_a_broken_call_comes_back() -> None:
    bad = '<tool_call>{"name": "get_weather", "arguments": {"days": 1, x'
    deltas, end = answer([CALL, bad])
    assert [delta for delta in deltas if isinstance(delta, CallBroken)] == [CallBroken()]
    assert text_of(deltas) == bad
    assert end.finish_reason == "tool_calls"
    deltas, end = answer([bad])
    assert (text_of(deltas), end.finish_reason) == (bad, "stop")


def test_an_answer_that_is_cut_off_ends_for_its_length_also_after_a_call() -> None:
    _, end = answer([CALL, "<tool_call>{"], reason="length")
    assert end.finish_reason == "length"


def test_without_parallel_calls_the_first_ends_the_answer() -> None:
    deltas, end = answer([CALL[:40], CALL[40:] + CALL, CALL], parallel=False)
    assert sum(isinstance(delta, CallStart) for delta in deltas) == 1
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
    deltas, end = answer(words, reason="length", forced=True)
    assert [json.loads(delta.arguments)["city"] for delta in deltas if isinstance(delta, CallEnd)] == cities
    assert sum(isinstance(delta, CallStart) for delta in deltas) == len(cities)
    assert (end.finish_reason, text_of(deltas)) == ("tool_calls", "")


@pytest.mark.parametrize("days", ["18446744073709551616", "18446744073709551617", "1e309", "[" * 300 + "]" * 300])
def test_calls_with_numbers_beyond_64_bits_are_told_apart(days: str) -> None:
    calls = [CALL.replace('"Paris"', number) + "\n" for number in ("18446744073709551615", days)]
    deltas, end = answer(calls, forced=True)
    assert [delta.arguments for delta in deltas if isinstance(delta, CallEnd)][1:] == [f'{{"city": {days}}}']
    assert end.finish_reason == "tool_calls"


@pytest.mark.parametrize("half", [ROME[:20], ROME[:60], ROME[:-3], "\n<tool"])
def test_no_half_call_is_left_in_the_text_of_a_forced_answer(half: str) -> None:
    for before in ([], [CALL + "\n"]):
        deltas, end = answer([*before, half], reason="length", forced=True)
        assert text_of(deltas) == ""
        assert sum(isinstance(delta, CallEnd) for delta in deltas) == len(before) + (half == ROME[:-3])
        assert end.finish_reason == "length"


def test_stop_strings_are_looked_for_in_visible_text_only() -> None:
    deltas, end = answer(["<think>", "END ", "of it", "</think>", "a E", "ND b", "c"], stops=("END",))
    assert "".join(d.text for d in deltas if isinstance(d, ReasoningDelta)) == "END of it"
    assert (text_of(deltas), end.stop_string, end.finish_reason) == ("a ", "END", "stop")
    assert end.completion_tokens == 6
    deltas, end = answer([CALL.replace("Paris", "END")], stops=("END",))
    assert (end.finish_reason, end.stop_string) == ("tool_calls", None)


def test_the_beginning_of_a_stop_string_is_shown_when_a_call_follows() -> None:
    deltas, _ = answer(["a EN", "\n" + CALL], stops=("END",))
    assert text_of(deltas) == "a EN"
    assert isinstance(deltas[-1], CallEnd)


def test_reasoning_tokens_are_counted_with_their_tags() -> None:
    _, end = answer(["<think>", "Two ", "words.", "</think>", "\n\n", "Yes", "."])
    assert (end.reasoning_tokens, end.completion_tokens) == (4, 7)
    _, end = answer(["<think>", "Two ", "words."], reason="length")
    assert end.reasoning_tokens == 3
    _, end = answer(["Yes", "."])
    assert end.reasoning_tokens == 0


@given(
    words=st.lists(st.sampled_from(["a", " b", "EN", "D", "\n", "<think>", "</think>", "<", CALL, "<tool_call>{"])),
    stops=st.sampled_from([(), ("END",), ("b<", "D")]),
)
def test_tokens_are_those_of_the_text(words: list[str], stops: tuple[str, ...]) -> None:
    """A token beside visible text begins in it, or at the white space before it; none comes twice or out of order."""
    deltas, _ = answer(words, stops=stops)
    for delta in deltas:
        if isinstance(delta, TextDelta | ReasoningDelta):
            for token in delta.tokens:
                assert words[token.token].strip() == "" or any(char in delta.text for char in words[token.token])
    numbers = [t.token for d in deltas if isinstance(d, TextDelta | ReasoningDelta) for t in d.tokens]
    assert numbers == sorted(set(numbers))
    shown = "".join(d.text for d in deltas if isinstance(d, TextDelta | ReasoningDelta))
    if not any(isinstance(delta, CallStart) for delta in deltas):
        beside = "".join(words[number] for number in numbers)
        assert shown.replace("\n", "") in beside.replace("\n", "")


def test_the_end_says_what_failed() -> None:
    one = reader(["<tool_call>{"])
    one.push(TokenEvent(0))
    error = RuntimeError("broken")
    *rest, end = one.finish(Failed(error), REPORT)
    assert text_of(rest) == "<tool_call>{"
    assert (end.error, end.finish_reason) == (error, "length")


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_empty_answer_has_only_an_end(reason: str) -> None:
    assert answer([], reason=reason)[0] == []


def read_from(deltas: Sequence[object]) -> tuple[str, str, list[str]]:
    """The text, the reasoning and the arguments of calls."""
    thought = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    return text_of(deltas), thought, [delta.arguments for delta in deltas if isinstance(delta, CallEnd)]


@pytest.mark.parametrize("cut", [1, 3, 50])
@pytest.mark.parametrize(
    "before", ["It is 42.", "<think>so</think>It is <42", CALL, "<tool_call>{", "<think>never closed"]
)
def test_a_spelled_turn_end_ends_the_answer_like_an_end_token(before: str, cut: int) -> None:
    text = before + "<|im_end|>\n<|im_start|>user\nAnd what else?"
    words = [text[at : at + cut] for at in range(0, len(text), cut)]
    deltas, done = answer(words, turn_end="<|im_end|>")
    expected, normal = answer([before], reason="stop")
    assert read_from(deltas) == read_from(expected)
    assert (done.finish_reason, done.stop_string, done.error) == (normal.finish_reason, None, None)
    assert done.completion_tokens <= len(before + "<|im_end|>") // cut + 1


def test_without_its_whole_end_nothing_of_a_turn_is_held_back() -> None:
    assert text_of(answer(["a <|im_", "start|> <|im_en"], turn_end="<|im_end|>")[0]) == "a <|im_start|> <|im_en"


# --- plain text, as completions have it -------------------------------------------------------------------------------

TOKENIZER = byte_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def plain(stops: tuple[str, ...] = ()) -> AnswerReader:
    return AnswerReader(
        IncrementalDetokenizer(VOCABULARY.decode),
        plain_text(),
        StopMatcher(stops),
        end_ids=frozenset({TOKENIZER.eos_token_id}),
        with_tokens=True,
        every_token=True,
    )


def read(one: AnswerReader, tokens: Sequence[int]) -> tuple[list[str], list[TextDelta]]:
    """The text that each token makes visible, and all deltas but the end."""
    pushed = [one.push(TokenEvent(token, -1.0)) for token in tokens]
    *rest, _ = one.finish(Finished("length", len(tokens), REPORT), REPORT)
    deltas = [delta for delta in [*chain.from_iterable(pushed), *rest] if isinstance(delta, TextDelta)]
    return [text_of(deltas) for deltas in pushed], deltas


@given(
    text=st.text(alphabet="ab\n 🎉é你", max_size=20),
    stops=st.lists(st.sampled_from(["a", "ab", "🎉", "\n b"]), max_size=3),
)
def test_tokens_travel_with_the_text_they_begin(text: str, stops: list[str]) -> None:
    one = plain(tuple(stops))
    _, deltas = read(one, ids(text))
    assert [event.token for delta in deltas for event in delta.tokens] == ids(text_of(deltas))
    assert one.over == any(stop in text for stop in stops)


def test_end_tokens_count_but_are_not_shown() -> None:
    one = plain()
    shown, deltas = read(one, [*ids("hi"), TOKENIZER.eos_token_id])
    assert shown == ["h", "i", ""]
    assert (one.completion_tokens, text_of(deltas)) == (3, "hi")


@pytest.mark.parametrize("every_token", [False, True])
def test_tokens_that_decode_to_nothing_come_at_the_end_if_every_token_is_wanted(every_token: bool) -> None:
    words = ["a", "", "b", ""]
    detokenizer = IncrementalDetokenizer(lambda tokens: "".join(words[token] for token in tokens))
    one = AnswerReader(detokenizer, plain_text(), with_tokens=True, every_token=every_token)
    _, deltas = read(one, range(4))
    told = [[event.token for event in delta.tokens] for delta in deltas]
    assert told == [[0], [1, 2], *[[3]] * every_token]
    assert one.take_ids() == [0, 1, 2, 3]
