"""Where lines and sentences begin, with a byte-level and a SentencePiece tokenizer."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_specprefill.prefill.units import TextUnits

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "target"
TEXT = """The code for Anna is 471128. Version 3.11 came later! Did it?  Yes.
{"id": 12, "email": "a.b@c.org"}
    x = y.z(1.5)

第一句。第二句。 end"""


def metaspace() -> TokenizerWrapper:
    """Every character a token, spaces as the first character of words: how SentencePiece writes them."""
    characters = sorted({*TEXT, "\u2581"} - {" "})
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, [], unk_token=None))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=inner))


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
    if kind == "byte-level":
        pieces = [tokenizer.decode([token]) for token in ids]
        assert "".join(pieces).replace("\ufffd", "") != ""
    else:
        pieces = [piece.replace("\u2581", " ") for piece in tokenizer.convert_ids_to_tokens(ids)]
    units = TextUnits(tokenizer)
    assert units.starts(ids).tolist() == by_hand(pieces)
    assert units.starts(ids[::-1]).tolist()[0] == 0
    assert units.starts(ids).tolist() == by_hand(pieces)  # from what is remembered


def test_no_unit_ends_within_a_number_or_an_address() -> None:
    tokenizer = load(DEMO)
    text = 'Pi is 3.14159. {"email": "anna.b@c.org"}\nnext'
    ids = tokenizer.encode(text, add_special_tokens=False)
    starts = TextUnits(tokenizer).starts(ids).tolist()
    units = [tokenizer.decode(ids[a:b]) for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]
    assert units == ["Pi is 3.14159.", ' {"email": "anna.b@c.org"}\n', "next"]


def test_token_ids_beyond_those_seen_are_learned() -> None:
    tokenizer = load(DEMO)
    units = TextUnits(tokenizer)
    assert units.starts([5]).tolist() == [0]
    newline = tokenizer.encode("\n", add_special_tokens=False)
    assert units.starts([*newline, 4000, *newline, 7]).tolist() == [0, 1, len(newline) * 2 + 1]
    assert units.starts(np.array([3])).dtype == np.int32
