"""Lines and sentences, with a byte-level and a SentencePiece tokenizer."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_specprefill.selection.text import PromptText, TextReader

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo" / "target"
TEXT = """The code for Anna is 471128. Version 3.11 came later! Did it?  Yes.
{"id": 12, "email": "a.b@c.org"}
    x = y.z(1.5)

第一句。第二句。 end"""


def metaspace(text: str = TEXT) -> TokenizerWrapper:
    """Every character a token, spaces as the first character of words: how SentencePiece writes them."""
    characters = sorted({*text, "\u2581"} - {" "})
    inner = Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, [], unk_token=None))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=inner))


def joined(text: str) -> TokenizerWrapper:
    """Return a tokenizer with one token for a line break and the blanks behind it, and one for a word."""
    pattern = r"\n+[ \t]*|[ \t]*[^\s]+|[ \t]+"
    words = {word: index for index, word in enumerate(sorted(set(re.findall(pattern, text))))}
    inner = Tokenizer(models.WordLevel({**words, "?": len(words)}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False))


def pieces_of(tokenizer: TokenizerWrapper, ids: list[int], kind: str) -> list[str]:
    """The text that each token stands for."""
    if kind == "byte-level":
        return [tokenizer.decode([token]) for token in ids]
    return [piece.replace("\u2581", " ") for piece in tokenizer.convert_ids_to_tokens(ids)]


def by_hand(pieces: list[str]) -> list[int]:
    """Return the pieces that start a sentence: after a line break, or after a full stop and before a space."""
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


def test_threads_that_learn_at_once_read_what_one_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load(DEMO)
    prompts = [list(range(start, start + 40)) for start in range(20, 820, 40)]
    expected = [TextReader(tokenizer).read(ids).units.tolist() for ids in prompts]
    reader = TextReader(tokenizer)
    pad, learn = np.pad, reader._text_of

    def slow_pad(*arguments: Any, **options: Any) -> Any:
        """Others run between the copy and its use."""
        padded = pad(*arguments, **options)
        time.sleep(2e-3)
        return padded

    def slow_learn(*token: Any) -> str:
        time.sleep(1e-4)
        return learn(*token)

    monkeypatch.setattr(np, "pad", slow_pad)
    monkeypatch.setattr(reader, "_text_of", slow_learn)
    with ThreadPoolExecutor(8) as threads:
        found = [text.units.tolist() for text in threads.map(reader.read, prompts)]
    assert found == expected
    assert [reader.read(ids).units.tolist() for ids in prompts] == expected


def test_token_ids_beyond_those_seen_are_learned() -> None:
    tokenizer = load(DEMO)
    reader = TextReader(tokenizer)
    assert reader.read([5]).units.tolist() == [0]
    newline = tokenizer.encode("\n", add_special_tokens=False)
    assert reader.read([*newline, 4000, *newline, 7]).units.tolist() == [0, 1, len(newline) * 2 + 1]
    assert reader.read(np.array([3])).units.dtype == np.int32


@pytest.mark.parametrize("ids", [[], [5], [0, 0]])
def test_next_to_nothing_is_one_unit(ids: list[int]) -> None:
    assert TextReader(load(DEMO)).read(ids).units.tolist() == [0]


# What each sentence is, lines that were broken because they were full included.
def test_the_rest_of_a_prompt() -> None:
    text = PromptText(np.array([0, 4, 9], dtype=np.int32))
    for start, units in ((0, [0, 4, 9]), (4, [0, 5]), (6, [0, 3]), (9, [0]), (10, [0])):
        rest = text.part(start, 12)
        assert rest.units.tolist() == units
        assert rest.units.dtype == np.int32
    assert text.part(4, 9).units.tolist() == [0]


FOUND = """Here is what was found:

src/one.py
12: def first():
14:     return 1

src/two.py
   3\tdef second():
That was all of it, and this line is no heading because none with a number follows.
"""


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_the_name_of_a_file_is_the_heading_of_the_numbered_lines_below_it(kind: str) -> None:
    tokenizer = load(DEMO) if kind == "byte-level" else metaspace(FOUND)
    ids = tokenizer.encode(FOUND, add_special_tokens=False)
    read = TextReader(tokenizer).read(np.array(ids, dtype=np.int32))
    pieces = pieces_of(tokenizer, ids, kind)
    shown = [("".join(pieces[a:b]).strip(), "".join(pieces[b:c]).strip()) for a, b, c in read.headings]
    assert [(heading, re.sub(r"\s+", " ", below)) for heading, below in shown] == [
        ("src/one.py", "12: def first(): 14: return 1"),
        ("12: def first():", "14: return 1"),
        ("src/two.py", "3 def second():"),
    ]
    last = int(read.headings[2, 0])
    assert np.array_equal(read.part(last, len(ids)).headings, read.headings[2:] - last)
    assert np.array_equal(read.part(0, last).headings, read.headings[:2])
    assert not read.part(last + 1, len(ids)).headings.size


CODE = '''import os

class Queue:
    """Hold entries."""

    def put(self, entry):
        if entry:
            self.rows.append(entry)

    def get(self):
        return self.rows.pop()

def free():
\treturn {
\t\t"a": 1,

\t\t"b": 2,
\t}
rest = True
'''


def blocks_by_hand(text: str) -> list[tuple[str, str]]:
    """Return every line above further indented lines, with these."""
    lines = [line for line in text.split("\n") if line.strip()]
    depth = [len(line) - len(line.lstrip()) for line in lines]
    found = []
    for index, line in enumerate(lines):
        end = next((n for n in range(index + 1, len(lines)) if depth[n] <= depth[index]), len(lines))
        if end > index + 1:
            found.append((line.strip(), " ".join("".join(lines[index + 1 : end]).split())))
    return found


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "joined"])
@pytest.mark.parametrize(
    "text", [CODE, CODE.replace("\t", "  "), " " * 4 + "a\n  b\n   c\nd\n e", FOUND.replace("\t", "")]
)
def test_a_line_is_the_heading_of_the_further_indented_lines_below_it(kind: str, text: str) -> None:
    text = re.sub(r"^( *)\d+:?", r"\1", text, flags=re.MULTILINE)  # numbers are another reason
    tokenizer = {"byte-level": lambda _: load(DEMO), "metaspace": metaspace, "joined": joined}[kind](text)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, ids, kind)
    found = TextReader(tokenizer).read(ids).headings
    shown = [("".join(pieces[a:b]).strip(), "".join(pieces[b:c])) for a, b, c in found]
    joined_lines = [(heading, " ".join(below.replace("\n", "").split())) for heading, below in shown]
    assert joined_lines == blocks_by_hand(text)


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
@pytest.mark.parametrize("number", ["{:2}\t", "{:2}\u2192", "{}:", "{}: "])
def test_numbered_lines_are_headings_as_without_numbers(kind: str, number: str) -> None:
    """As `cat -n`, `grep -n` and agents show a file: from 5 on, so that the number becomes wider."""
    text = "\n".join(number.format(n) + line for n, line in enumerate(CODE.splitlines(), 5))
    tokenizer = load(DEMO) if kind == "byte-level" else metaspace(text)
    ids = tokenizer.encode(text, add_special_tokens=False)

    def bare(start: int, end: int) -> str:
        shown = tokenizer.decode(ids[start:end])
        return " ".join(re.sub(r"^ *\d+[\t\u2192:]", " ", shown, flags=re.MULTILINE).split())

    found = TextReader(tokenizer).read(ids).headings
    assert [(bare(a, b), bare(b, c)) for a, b, c in found] == blocks_by_hand(CODE)


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_numbers_of_the_text_are_no_line_numbers(kind: str) -> None:
    text = "rows:\n  sizes: [\n    12,\n    7,\n    40 * 2\n  ]\n  rest"
    tokenizer = load(DEMO) if kind == "byte-level" else metaspace(text)
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = [
        "".join(pieces_of(tokenizer, ids[a:c], kind)).split() for a, _, c in TextReader(tokenizer).read(ids).headings
    ]
    assert found == [text.split(), "sizes: [ 12, 7, 40 * 2".split()]


def test_the_first_part_of_a_block_keeps_its_heading() -> None:
    text = PromptText(np.array([0, 4, 9], dtype=np.int32), np.array([[0, 4, 20], [4, 9, 16]], dtype=np.int32))
    assert text.part(0, 12).headings.tolist() == [[0, 4, 12], [4, 9, 12]]
    assert text.part(0, 9).headings.tolist() == [[0, 4, 9]]
    assert text.part(4, 30).headings.tolist() == [[0, 5, 12]]
