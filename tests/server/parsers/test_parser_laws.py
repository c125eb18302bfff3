"""Laws for every text, however wrong: nothing is lost or invented, no cutting matters, nothing raises."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples

from ..notations import NOTATIONS
from .reading import STRING, Read, collected, read, tool
from .test_formats import CALL, GEMMA, GLM, HARMONY, LLAMA, MINIMAX, MISTRAL, STEP, XML
from .test_reasoning import SKETCHED

FORMATS: list[str] = ["hermes", "xml", "glm", "minimax", "gemma", "mistral", "harmony"]
CALLS = [CALL, XML, GLM, MINIMAX, GEMMA, MISTRAL, HARMONY]
FRAGMENTS = [
    *re.findall(r"<[^>]+>|\[[A-Z_]+\]|\"[a-z]+\"|[{}:,\n]|\w+", "".join(CALLS)),
    "<think>", "</think>", "<|end|>", "<|start|>assistant", '{"name"', "[", "]", "<", "\\", '"', '\\"', "\\ud83d", " ",
    *CALLS, STEP, LLAMA, f'{{"tool_calls": [{LLAMA}]}}', "[now()]", "[get_weather(city=", "'", ", days=", ")]",
]  # fmt: skip
BEGINNINGS = [
    '<tool_call>{"name": "write", "arguments": {"a": "', "<tool_call><function=write><parameter=content>", '{"name"',
    "<tool_call>{", "[TOOL_CALLS]", "<|tool_call>call:write{a:", "<|channel|>",
    '<minimax:tool_call><invoke name="write"><parameter name="content">', f"<think>{CALL} no ",
    '{"tool_calls": [', "[now(", "[get_weather(city=", "[get_weather(city='", f"no {LLAMA} [now()] no ", STEP[:60],
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=14).map("".join)
TAGS = re.compile(
    r"</?think>|<\|(?:channel|start|message|end|call|return|constrain)\|>|assistant|analysis|commentary|final"
)
HALF = re.compile(r"</?[\w|:]*|\[[A-Z_]*")  # of a tag
FIRST = re.compile(r"<(?!\|message)[^>=]+[>=]|\[TOOL_CALLS\]")  # tag of a call


def unsaid(text: str, out: Read) -> list[str]:
    """The stretches of a text that were neither said as text nor as reasoning."""
    said = bytearray(len(text))
    for part in out.said:
        assert text[part.start : part.start + len(part.text)] == part.text
        said[part.start : part.start + len(part.text)] = b"x" * len(part.text)
    borders = [0, *(i for i in range(1, len(text)) if said[i] != said[i - 1]), len(text)]
    return [text[a:b] for a, b in pairwise(borders) if a < b and not said[a]]


@pytest.mark.parametrize("fmt", FORMATS)
@settings(max_examples=examples(150))
@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=12), complete=st.booleans(), opened=st.booleans())
@example(
    text='<tool_call>{"name": "get_weather", "arguments": {"city": "\\ud83d"}}', cuts=[], complete=True, opened=False
)
def test_any_text(fmt: str, text: str, cuts: list[int], complete: bool, opened: bool) -> None:
    prompt = "<think>" if opened else ""
    out = read(fmt, text, prompt=prompt, complete=complete)
    assert out == read_again(fmt, text, cuts, prompt, complete, out)
    for _, arguments in out.calls:
        assert isinstance(json.loads(arguments), dict)
        arguments.encode()  # no half of a surrogate pair
    lost = [stretch for stretch in unsaid(text, out) if TAGS.sub("", stretch).strip()]
    if lost and not complete and text.endswith(lost[-1]) and HALF.fullmatch(lost[-1].strip()):
        lost.pop()
    if not out.calls:
        assert not lost or fmt == "harmony", lost
    names = {name for name, _ in out.calls}
    assert all(fmt == "harmony" or any(name in stretch for name in names) for stretch in lost), lost


def read_again(fmt: str, text: str, cuts: list[int], prompt: str, complete: bool, whole: Read) -> Read:
    """The same in pieces; where text is said in other pieces, the places are those of the whole."""
    out = read(fmt, text, [cut for cut in cuts if cut < len(text)], prompt=prompt, complete=complete)
    assert "".join(part.text for part in out.said) == "".join(part.text for part in whole.said)
    out.said = whole.said
    return out


def cut_off(notation: str, text: str, cuts: list[int], complete: bool = False) -> Read:
    parser = NOTATIONS[notation].format.parser([tool("f", a=STRING)], "")
    deltas = [delta for start, end in pairwise([0, *cuts, len(text)]) for delta in parser.push(text[start:end])]
    return collected(deltas + parser.finish(complete))


@pytest.mark.parametrize("notation", NOTATIONS)
def test_a_call_that_is_cut_off_behind_its_arguments_shows_no_half_of_its_end_tag(notation: str) -> None:
    whole = NOTATIONS[notation].write({"a": "xyz"})
    for cut in range(1, len(whole) + 1):
        for cuts in ([], list(range(1, cut))):
            out = cut_off(notation, whole[:cut], cuts)
            assert not (out.calls and out.text), whole[:cut]
    assert out.calls


@pytest.mark.parametrize("notation", [name for name in NOTATIONS if name != "harmony"])  # its tags are tokens
@pytest.mark.parametrize("before", ["", "Hello.", "```\n", "See `"])
def test_half_of_the_first_tag_of_a_call_is_text_where_no_call_can_begin(notation: str, before: str) -> None:
    found = FIRST.search(NOTATIONS[notation].write({"a": "xyz"}))
    assert found is not None
    for size in range(1, len(found[0])):
        text = before + found[0][:size]
        for cuts in ([], list(range(1, len(text)))):
            assert cut_off(notation, text, cuts).text == (text if size == 1 or "`" in before else before)
            assert cut_off(notation, text, cuts, complete=True).text == text


@pytest.mark.parametrize(("tags", "fmt"), {think: fmt for fmt, _, think in SKETCHED}.items())
def test_reasoning_that_is_cut_off_shows_no_half_of_its_tags(tags: tuple[str, str], fmt: str | None) -> None:
    text = f"{tags[0]}Hm.{tags[1]}"
    for cut in range(1, len(text) + 1):
        for cuts in ([], list(range(1, cut))):
            out = read(fmt, text[:cut], cuts, think=tags, complete=False)
            assert (out.text, out.reasoning) == ("", "Hm."[: max(0, cut - len(tags[0]))]), text[:cut]


@pytest.mark.extended
@pytest.mark.parametrize("fmt", FORMATS)
def test_many_broken_calls_take_linear_time(fmt: str) -> None:
    """Each beginning is tried once; 100 000 characters would take minutes in squared time."""
    for fragment in BEGINNINGS:
        text = fragment * (40_000 // len(fragment))
        out = read(fmt, text, range(0, len(text), 50))
        assert not out.calls
