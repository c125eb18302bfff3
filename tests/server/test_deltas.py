from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mlx_specprefill import TokenEvent
from mlx_specprefill_server.generating.deltas import AnswerText, Delta, IncrementalText, StopMatcher, Stops
from mlx_specprefill_server.generating.vocabulary import Vocabulary

from .fakes import byte_tokenizer

TOKENIZER = byte_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER)
TEXTS = st.text(alphabet="ab\n 🎉é你�\u0301", max_size=20)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@given(prompt=TEXTS, answer=TEXTS)
def test_the_parts_make_the_text_and_never_split_a_character(prompt: str, answer: str) -> None:
    text = IncrementalText(VOCABULARY.decode, ids(prompt))
    parts = [text.push(token) for token in ids(answer)] + [text.finish()]
    assert "".join(parts) == answer
    assert all(set(part) <= set(answer) for part in parts)


def test_a_character_waits_for_its_last_byte() -> None:
    text = IncrementalText(VOCABULARY.decode)
    assert [text.push(token) for token in ids("é🎉")] == ["", "é", "", "", "", "🎉"]


def test_an_answer_that_ends_inside_a_character_shows_a_replacement() -> None:
    text = IncrementalText(VOCABULARY.decode)
    assert [text.push(token) for token in ids("a🎉")[:3]] == ["a", "", ""]
    assert text.finish() == "�"


def test_endless_garbage_is_shown_instead_of_held_for_ever() -> None:
    text = IncrementalText(VOCABULARY.decode)
    shown = "".join(text.push(ids("🎉")[0]) for _ in range(20))
    assert set(shown) == {"�"}
    assert len(shown) >= 12


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_stop_strings_end_the_text_before_the_first_to_be_complete(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(Stops(tuple(stops)))
    borders = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    shown = ""
    for start, end in pairwise(borders):
        shown += matcher.push(text[start:end])
        assert text.startswith(shown)
    shown += matcher.finish()
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert shown == (text[: min(ends)[1]] if ends else text)
    assert matcher.matched == (min((end, at, text[at:end]) for end, at in ends)[2] if ends else None)


def test_what_may_be_a_stop_string_is_held_back_and_nothing_more() -> None:
    matcher = StopMatcher(Stops(("END", "ENOUGH")))
    assert [matcher.push(part) for part in ("xE", "N", "a", "EN", "OUG")] == ["x", "", "ENa", "", ""]
    assert matcher.finish() == "ENOUG"


def answer(stops: tuple[str, ...] = (), prompt: str = "") -> AnswerText:
    return AnswerText(
        3, VOCABULARY.decode, ids(prompt), Stops(tuple(stops)), frozenset({TOKENIZER.eos_token_id}), with_tokens=True
    )


@given(
    text=st.text(alphabet="ab\n 🎉é你", max_size=20),
    stops=st.lists(st.sampled_from(["a", "ab", "🎉", "\n b"]), max_size=3),
)
def test_tokens_travel_with_the_text_they_begin(text: str, stops: list[str]) -> None:
    writer = answer(tuple(stops))
    deltas = [writer.push(TokenEvent(token, -1.0)) for token in ids(text)] + [writer.finish()]
    shown = "".join(delta.text for delta in deltas)
    tokens = [event.token for delta in deltas for event in delta.tokens]
    assert tokens == ids(shown)
    assert writer.stopped == any(stop in text for stop in stops)


def test_end_tokens_count_but_are_not_shown() -> None:
    writer = answer()
    shown = [writer.push(TokenEvent(token)).text for token in [*ids("hi"), TOKENIZER.eos_token_id]]
    assert shown == ["h", "i", ""]
    assert writer.completion_tokens == 3
    assert writer.finish() == Delta(3, "", end=2, completion_tokens=3)


def test_tokens_after_a_stop_string_count_no_more() -> None:
    writer = answer(("b",))
    texts = [writer.push(TokenEvent(token)).text for token in ids("abccc")]
    assert texts == ["a", "", "", "", ""]
    assert writer.completion_tokens == 2
    assert writer.finish().text == ""


def test_a_leading_space_survives_a_decoder_that_strips_it() -> None:
    words = {1: "capital", 2: "is", 3: "Paris"}

    def decode(tokens: Sequence[int]) -> str:
        return " ".join(words[token] for token in tokens)

    text = IncrementalText(decode, [1, 2])
    assert text.push(3) == " Paris"
