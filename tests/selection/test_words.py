"""Words of a prompt whatever its tokens are, and the lines that share rare ones with the question."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_specprefill.selection.text import PromptText, TextReader
from mlx_specprefill.selection.words import word_factors

ALPHABET = "aAb_9é ,.\n\"'-("
RECORDS = [
    f'{{"name": "get_{kind}", "line": {number}}}\n' for number, kind in enumerate("user order item price".split())
]


class Pieces:
    """A tokenizer whose tokens are given."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [
            self._pieces[i].replace(" ", "\u0120", 1) if self._pieces[i][:1] == " " else self._pieces[i] for i in ids
        ]

    def decode(self, ids: list[int]) -> str:
        return "".join(self._pieces[i] for i in ids)


def read(pieces: list[str]) -> PromptText:
    tokenizer: Any = Pieces(pieces)
    return TextReader(tokenizer).read(np.arange(len(pieces), dtype=np.int32))


def lines_of(pieces: list[str]) -> tuple[PromptText, list[int]]:
    """Return the text, and the first token of each line."""
    return read(pieces), [0, *(at + 1 for at, piece in enumerate(pieces[:-1]) if piece.endswith("\n"))]


def tokens(text: str) -> list[str]:
    """Return the tokens of a text: a word with the blank before it, or any other character."""
    return re.findall(r" ?\w+|\W", text)


@given(st.text(ALPHABET, min_size=1, max_size=60), st.data())
def test_a_text_is_that_of_its_tokens_however_it_is_cut(text: str, data: Any) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)))) | {0, len(text)})
    assert "".join(read([text[a:b] for a, b in pairwise(cuts) if a < b]).pieces) == text


def factors(text: str, question: str) -> tuple[np.ndarray, list[int]]:
    """Return the factors of a text with a question behind it, and the first token of each of its lines."""
    pieces = [*tokens(text), *tokens(question)]
    found, starts = lines_of(pieces)
    asked = len(tokens(text)), len(pieces)
    return word_factors(found, [asked]), starts


@pytest.mark.parametrize("wanted", range(len(RECORDS)))
def test_the_record_that_the_question_names_is_raised_most(wanted: int) -> None:
    name = re.findall(r"get_\w+", RECORDS[wanted])[0]
    found, starts = factors("".join(RECORDS), f"On which line is {name.upper()}?")
    lines = found[starts[: len(RECORDS)]]
    assert lines.argmax() == wanted
    assert lines[wanted] == 1.25  # half of what it may gain, for one word that stands nowhere else
    assert (np.delete(lines, wanted) < 1.25).all()
    assert (found[starts[len(RECORDS)] :] == 1).all()  # the question's own line


def test_a_rarer_word_weighs_more_than_a_common_one() -> None:
    text = "red car\nred bus\nred van\nblue car\nold train\n"
    found, starts = factors(text, "Is it red or blue?")
    lines = found[starts[:5]]
    assert lines.argmax() == 3
    assert lines[0] == lines[1] == lines[2] > lines[4] == 1


def test_two_words_that_stand_nowhere_else_raise_by_half_and_more_words_no_further() -> None:
    text = "the old harbour town\nthe new town\nthe north\n"
    two, starts = factors(text, "harbour old?")
    four, _ = factors(text, "harbour old, the north, new, town?")
    assert two[starts[0]] == four[starts[0]] == 1.5
