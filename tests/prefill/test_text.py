"""Lines, sentences and the words that two of them share, with a byte-level and a SentencePiece tokenizer."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_specprefill.prefill.text import PromptText, TextReader

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "target"
TEXT = """The code for Anna is 471128. Version 3.11 came later! Did it?  Yes.
{"id": 12, "email": "a.b@c.org"}
    x = y.z(1.5)

第一句。第二句。 end"""


def metaspace() -> TokenizerWrapper:
    """Every character a token, spaces as the first character of words: how SentencePiece writes them."""
    characters = sorted({*TEXT, *SHARED, "\u2581"} - {" "})
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, [], unk_token=None))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=inner))


def pieces_of(tokenizer: TokenizerWrapper, ids: list[int], kind: str) -> list[str]:
    """The text that each token stands for."""
    if kind == "byte-level":
        return [tokenizer.decode([token]) for token in ids]
    return [piece.replace("\u2581", " ") for piece in tokenizer.convert_ids_to_tokens(ids)]


def by_hand(pieces: list[str]) -> list[int]:
    """Of the pieces that a text is cut into: those after a line break, or after a full stop and before a space."""
    starts = [0]
    for index in range(1, len(pieces)):
        before, after = pieces[index - 1], pieces[index]
        if "\n" in before or before[-1] in "。" or (re.search(r"[.!?] *$", before) and after[:1].isspace()):
            starts.append(index)
    return starts


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_units_equal_those_of_the_text(kind: str) -> None:
    tokenizer = load(DEMO) if kind == "byte-level" else metaspace()
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    pieces = pieces_of(tokenizer, ids, kind)
    assert "".join(pieces).replace("\ufffd", "") != ""
    reader = TextReader(tokenizer)
    assert reader.read(ids).units.tolist() == by_hand(pieces)
    assert reader.read(ids[::-1]).units.tolist()[0] == 0
    assert reader.read(ids).units.tolist() == by_hand(pieces)  # from what is remembered


def test_no_unit_ends_within_a_number_or_an_address() -> None:
    tokenizer = load(DEMO)
    text = 'Pi is 3.14159. {"email": "anna.b@c.org"}\nnext'
    ids = tokenizer.encode(text, add_special_tokens=False)
    starts = TextReader(tokenizer).read(ids).units.tolist()
    units = [tokenizer.decode(ids[a:b]) for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]
    assert units == ["Pi is 3.14159.", ' {"email": "anna.b@c.org"}\n', "next"]


def test_token_ids_beyond_those_seen_are_learned() -> None:
    tokenizer = load(DEMO)
    reader = TextReader(tokenizer)
    assert reader.read([5]).units.tolist() == [0]
    newline = tokenizer.encode("\n", add_special_tokens=False)
    assert reader.read([*newline, 4000, *newline, 7]).units.tolist() == [0, 1, len(newline) * 2 + 1]
    assert reader.read(np.array([3])).units.dtype == np.int32


@pytest.mark.parametrize("ids", [[], [5], [0, 0]])
def test_nothing_to_share(ids: list[int]) -> None:
    text = TextReader(load(DEMO)).read(ids)
    assert (text.rare.shape, text.rare.dtype) == ((0, 3), np.int32)


COMMON = "".join(
    f"It is {word} here.\n" for word in ("hot", "wet", "dry", "raw", "dark", "cold", "late", "far", "still")
)
SHARED = f"""Anna Vorkesh works at the mill. Bob works in the snow.
The Kolmar mill is in Exeter, and Kolmar is old. Snow_line 417!
id: 417, "Vorkesh" and Vorkesh: nobody\tknows. Mill works are at 3.5.
{COMMON}Bob is still there."""


def rare_by_hand(pieces: list[str], units: list[int]) -> dict[str, list[int]]:
    """Words of the text that two to eight units hold, and the tokens where the first of each begin."""
    text, ends = "".join(pieces), np.cumsum([len(piece) for piece in pieces])
    places: dict[str, dict[int, int]] = {}
    for word in re.finditer(r"\w+", text):
        token = int((ends <= word.start()).sum())
        unit = sum(start <= token for start in units)
        places.setdefault(word.group(), {}).setdefault(unit, token)
    return {word: list(of.values()) for word, of in places.items() if 2 <= len(of) <= 8}


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_rare_words_are_those_that_a_few_units_share(kind: str) -> None:
    tokenizer = load(DEMO) if kind == "byte-level" else metaspace()
    ids = tokenizer.encode(SHARED, add_special_tokens=False)
    pieces = pieces_of(tokenizer, ids, kind)
    text = TextReader(tokenizer).read(ids)
    found: dict[str, list[int]] = {}
    for start, end, word in text.rare:
        (spelled,) = re.findall(r"\w+", "".join(pieces[start:end]))
        found.setdefault(spelled, []).append(int(start))
        assert (text.rare[text.rare[:, 0] == start, 2] == word).all()
    assert found == rare_by_hand(pieces, text.units.tolist())
    assert {word: len(places) for word, places in found.items() if word in ("Vorkesh", "417", "works", "Bob")} == {
        "Vorkesh": 2,
        "417": 2,
        "works": 3,
        "Bob": 2,
    }
    assert not {"Snow", "snow", "Kolmar", "nobody", "It", "here"} & found.keys()
    numbers = [{int(n) for n in text.rare[np.isin(text.rare[:, 0], places), 2]} for places in found.values()]
    assert all(len(of) == 1 for of in numbers)
    assert len(set.union(*numbers)) == len(found)


def test_the_rest_of_a_prompt() -> None:
    rare = np.array([[1, 2, 0], [5, 7, 0], [6, 7, 3], [9, 10, 3]], dtype=np.int32)
    text = PromptText(np.array([0, 4, 9], dtype=np.int32), rare)
    for start, units, places in (
        (0, [0, 4, 9], rare.tolist()),
        (4, [0, 5], [[1, 3, 0], [2, 3, 3], [5, 6, 3]]),
        (6, [0, 3], [[0, 1, 3], [3, 4, 3]]),
        (7, [0, 2], [[2, 3, 3]]),
    ):
        rest = text.since(start)
        assert (rest.units.tolist(), rest.rare.tolist()) == (units, places)
        assert rest.units.dtype == rest.rare.dtype == np.int32
