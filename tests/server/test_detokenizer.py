from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mlx_specprefill_server.generation.reader import IncrementalDetokenizer, StopMatcher, Vocabulary

from .fakes import byte_tokenizer

TOKENIZER = byte_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER)
TEXTS = st.text(alphabet="ab\n 🎉é你�\u0301", max_size=20)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@given(prompt=TEXTS, answer=TEXTS)
def test_the_parts_make_the_text_and_never_split_a_character(prompt: str, answer: str) -> None:
    text = IncrementalDetokenizer(VOCABULARY.decode, ids(prompt))
    parts = [text.push(token) for token in ids(answer)] + [text.finish()]
    assert "".join(parts) == answer
    assert all(set(part) <= set(answer) for part in parts)


def test_a_character_waits_for_its_last_byte() -> None:
    text = IncrementalDetokenizer(VOCABULARY.decode)
    assert [text.push(token) for token in ids("é🎉")] == ["", "é", "", "", "", "🎉"]


def test_an_answer_that_ends_inside_a_character_shows_a_replacement() -> None:
    text = IncrementalDetokenizer(VOCABULARY.decode)
    assert [text.push(token) for token in ids("a🎉")[:3]] == ["a", "", ""]
    assert text.finish() == "�"


def test_endless_garbage_is_shown_instead_of_held_for_ever() -> None:
    text = IncrementalDetokenizer(VOCABULARY.decode)
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
    matcher = StopMatcher(tuple(stops))
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
    matcher = StopMatcher(("END", "ENOUGH"))
    assert [matcher.push(part) for part in ("xE", "N", "a", "EN", "OUG")] == ["x", "", "ENa", "", ""]
    assert matcher.finish() == "ENOUG"


def test_a_leading_space_survives_a_decoder_that_strips_it() -> None:
    words = {1: "capital", 2: "is", 3: "Paris"}

    def decode(tokens: Sequence[int]) -> str:
        return " ".join(words[token] for token in tokens)

    text = IncrementalDetokenizer(decode, [1, 2])
    assert text.push(3) == " Paris"
