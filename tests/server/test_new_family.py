"""A new family of models is one declaration: detected, read in streams, forced, and rendered in history."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from mlx_specprefill_server.constrained.answer_grammar import constraint_of
from mlx_specprefill_server.notations import NOTATIONS, THINK_TAGS
from mlx_specprefill_server.notations.declaration import OBJECT, Notation, Written
from mlx_specprefill_server.notations.formats import Format, detect
from mlx_specprefill_server.parsers.json_calls import between_reader
from mlx_specprefill_server.prompt.form_probe import notation_of
from mlx_specprefill_server.prompt.forms import Form, messages_in

from .fakes import byte_tokenizer
from .parsers.reading import TOOLS, collected
from .test_output_format import accepts

OPEN, SHUT = "<|ask|>", "<|asked|>"
FAMILY = Notation(
    marks=((OPEN,),),
    readers={OPEN: between_reader(OPEN, SHUT)},
    think=("<|hm|>", "<|ah|>"),
    around=("<|say|>",),
    written=(Written(OBJECT, ",", f"{OPEN}[", f"]{SHUT}"),),
    history=lambda calls: f"{OPEN}{json.dumps(calls)}{SHUT}",
    history_mark=OPEN,
)
TEMPLATE = f"{{{{ messages }}}}{OPEN}<|hm|><|ah|>"
CALL = f'{OPEN}[{{"name": "get_weather", "arguments": {{"city": "Paris"}}}}]{SHUT}'


@pytest.fixture
def format_(monkeypatch: pytest.MonkeyPatch) -> Format:
    monkeypatch.setitem(NOTATIONS, "family", FAMILY)
    monkeypatch.setitem(THINK_TAGS, "family", FAMILY.think)
    return detect(byte_tokenizer(TEMPLATE, specials=()))


def test_it_is_detected(format_: Format) -> None:
    assert (format_.tools, format_.think) == ("family", FAMILY.think)
    assert notation_of(TEMPLATE, ()) == "family"


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize("as_json", [False, True])
def test_it_is_read_in_streams(format_: Format, step: int, as_json: bool) -> None:
    parser, text = format_.parser(TOOLS, "", as_json=as_json), f"<|hm|>Where?<|ah|><|say|>I ask.{CALL}"
    pieces = pairwise([*range(0, len(text), step), len(text)])
    out = collected([delta for a, b in pieces for delta in parser.push(text[a:b])] + parser.finish(True))
    assert (out.reasoning, out.text, out.calls) == ("Where?", "I ask.", [("get_weather", '{"city": "Paris"}')])


def test_its_calls_are_forced(format_: Format) -> None:
    constraint = constraint_of(None, TOOLS, "required", format_.tools)
    assert accepts(constraint, CALL)
    assert not accepts(constraint, CALL.replace('"Paris"', "5"))


def test_its_calls_stand_in_history(format_: Format) -> None:
    made: Any = {"name": "get_weather", "arguments": {"city": "Paris"}}
    call = {"id": "c", "type": "function", "function": made}
    conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    form = Form(calls="written", notation=str(format_.tools))
    assert messages_in(form, conversation)[-1] == {"role": "assistant", "content": CALL}
