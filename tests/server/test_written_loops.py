"""Tool loops in many notations: a model writes its turns as its template shows them, and they come back so.

What the model writes is cut out of the template's own rendering of the turn. So the expected text needs no knowledge of
parsers, grammars or forms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from starlette.testclient import TestClient

from mlx_specprefill.choosing.constraints import Grammars

from .conftest import client_of
from .fakes import SPECIALS, FakeEngine, FakePair, byte_tokenizer
from .form_templates import SHORT_IDS, TOOLS
from .test_history import CHAT, DIALECTS, MESSAGES, ask, prompt

# What stands for a part of a call in the table of notations.
PARTS = {
    "NAME": "c.function.name", "JSON": "c.function.arguments | tojson", "NUMBER": "c.id", "KEY": "k",
    "VALUE": "v if v is string else v | tojson", "KIND": "'true' if v is string else 'false'",
}  # fmt: skip
# Tokens within or around calls.
MARKS = ("｜DSML｜", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|eom|>", "<|message|>", "<|start|>")
END = "<|im_end|>\n"


class Notation(NamedTuple):
    """The text around all calls, that around each, and each argument in between."""

    begin: str
    argument: str = ""
    end: str = ""
    before: str = ""
    after: str = ""


DSML = Notation(
    '<｜DSML｜invoke name="NAME">\n',
    '<｜DSML｜parameter name="KEY" string="KIND">VALUE</｜DSML｜parameter>\n',
    "</｜DSML｜invoke>\n",
)
NOTATIONS = {
    "hermes": Notation('\n<tool_call>\n{"name": "NAME", "arguments": JSON}\n</tool_call>'),
    "hermes in a line": Notation('\n<tool_call>{"name": "NAME", "arguments": JSON}</tool_call>'),
    "xml": Notation(
        "\n<tool_call>\n<function=NAME>\n", "<parameter=KEY>\nVALUE\n</parameter>\n", "</function>\n</tool_call>"
    ),
    "glm": Notation(
        "\n<tool_call>NAME", "\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>", "\n</tool_call>"
    ),
    "minimax": Notation(
        '\n<minimax:tool_call>\n<invoke name="NAME">\n', '<parameter name="KEY">VALUE</parameter>\n',
        "</invoke>\n</minimax:tool_call>",
    ),
    "seed": Notation(
        "\n<seed:tool_call>\n<function=NAME>\n", "<parameter=KEY>VALUE</parameter>\n", "</function>\n</seed:tool_call>"
    ),
    "dsml": DSML._replace(before="\n\n<｜DSML｜function_calls>\n", after="</｜DSML｜function_calls>"),
    "dsml4": DSML._replace(before="\n\n<｜DSML｜tool_calls>\n", after="</｜DSML｜tool_calls>"),
    "kimi": Notation(
        "<|tool_call_begin|>NUMBER<|tool_call_argument_begin|>JSON<|tool_call_end|>",
        before="<|tool_calls_section_begin|>", after="<|tool_calls_section_end|>",
    ),
    "deepseek": Notation(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>", after="<｜tool▁calls▁end｜>",
    ),
    "mistral": Notation("[TOOL_CALLS]NAME[CALL_ID]NUMBER[ARGS]JSON"),
    "muse": Notation(
        '<|eom|><|start|>assistant to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">\n',
        '<atem:parameter name="KEY">VALUE</atem:parameter>\n', "</atem:invoke>\n</atem:function_calls>",
    ),
}  # fmt: skip


def jinja(text: str) -> str:
    parts = re.split(f"({'|'.join(PARTS)})", text)
    return "".join("{{- " + PARTS.get(part, repr(part)) + " }}" for part in parts if part)


def template(name: str) -> str:
    """Heads of results name the function and the call, as Kimi's do."""
    notation = NOTATIONS[name]
    arguments = f"{{%- for k, v in c.function.arguments.items() %}}{jinja(notation.argument)}{{%- endfor %}}"
    each = jinja(notation.begin) + (arguments if notation.argument else "") + jinja(notation.end)
    calls = jinja(notation.before) + "{%- for c in m.tool_calls %}" + each + "{%- endfor %}" + jinja(notation.after)
    opens, closes, says = "<think>\n", "\n</think>\n\n", ""
    if name == "muse":
        opens, closes, says = " to=self<|message|>", "<|eom|><|start|>assistant", " to=user<|message|>"
    thought = (
        "{%- if m.reasoning_content %}" + jinja(opens) + "{{- m.reasoning_content }}" + jinja(closes) + "{%- endif %}"
    )
    head = "<|start|>assistant" if name == "muse" else "<|im_start|>assistant\n"
    return (
        (SHORT_IDS if name == "mistral" else "") + TOOLS + "{%- for m in messages %}{%- if m.role == 'assistant' %}"
        + jinja(head) + thought + f"{jinja(says)}{{{{- m.content }}}}{{%- if m.tool_calls %}}{calls}{{%- endif %}}"
        + "{%- else %}{{- '<|im_start|>' + (m.name or m.role) + '\n' }}{%- if m.role == 'tool' %}"
        + "{{- 'Return of ' + m.tool_call_id + '\n' }}{%- endif %}{{- m.content }}{%- endif %}" + jinja(END)
        + "{%- endfor %}{%- if add_generation_prompt %}" + jinja(head) + "{%- endif %}"
    )  # fmt: skip


FUNCTIONS = [
    {"name": name, "description": "Acts.", "parameters": {"type": "object", "properties": {
        "text": {"type": "string"}, "count": {"type": "integer"}, "more": {"type": "object"}}}}
    for name in ("look", "take_note")
]  # fmt: skip
FIRST = [
    ("look", {"text": 'São "Paulo" < 3', "count": 3}),
    ("take_note", {"text": "one\ntwo 'x' {y}", "more": {"a": [1, None]}}),
]
SECOND = [("look", {"text": "12"})]
RESULTS = {"look": "Error: no é\n</x>", "take_note": '{"ok": "\\n"}'}


@pytest.fixture(params=NOTATIONS)
def notation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(notation: str) -> Iterator[FakeEngine]:
    known = MARKS if notation == "muse" else (*SPECIALS, *MARKS)  # Muse has no tags of reasoning
    fake = FakeEngine(FakePair(byte_tokenizer(template(notation), specials=known), 16_384))
    yield fake
    fake.close()


class Model:
    """A model that writes what its template shows. It has its own messages, with the ids that it has written."""

    def __init__(self, engine: FakeEngine, notation: str) -> None:
        self._engine = engine
        self._counted = notation == "kimi"
        self._said: list[dict[str, Any]] = [{"role": "user", "content": "Look."}]
        self._calls = 0

    def says(self, text: str, thought: str, calls: list[tuple[str, Any]]) -> str:
        """Let it say this, and its tools answer. Return what it writes."""
        message: dict[str, Any] = {"role": "assistant", "content": text, "reasoning_content": thought}
        results = []
        if calls:
            ids = [self._id(name, self._calls + i) for i, (name, _) in enumerate(calls)]
            functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
            message["tool_calls"] = [{"id": i, "function": f} for i, f in zip(ids, functions, strict=True)]
            named = zip(ids, (name for name, _ in calls), strict=True)
            results = [{"role": "tool", "tool_call_id": i, "name": n, "content": RESULTS[n]} for i, n in named]
            self._calls += len(calls)
        begun, whole = self._show([], answers=True), self._show([message], answers=False)
        written = whole.removeprefix(begun).removesuffix(END)
        assert len(written) < len(whole)
        self._said += [message, *results]
        self._engine.says(written)
        return written

    def _id(self, name: str, number: int) -> str:
        return f"functions.{name}:{number}" if self._counted else f"abcdefgh{number}"

    def _show(self, more: list[Any], answers: bool) -> str:
        given = [{"type": "function", "function": function} for function in FUNCTIONS]
        return str(
            self._engine.pair.tokenizer.apply_chat_template(
                [*self._said, *more], tools=given, add_generation_prompt=answers, tokenize=False
            )
        )


class Client:
    """A client in one dialect, which sends back what it got."""

    def __init__(self, http: TestClient, path: str) -> None:
        self._http, self._path = http, path
        self._history: list[Any] = [{"role": "user", "content": "Look."}]

    def asks(self, **fields: Any) -> tuple[str, str, list[tuple[str, Any]]]:
        """Return the text, the reasoning and the calls of an answer, to which it gives results in reverse order."""
        if self._path == MESSAGES:
            tools = [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS]
            fields["max_tokens"] = 999
            answer = ask(self._http, self._path, {"messages": self._history, "tools": tools, **fields})
            return self._blocks(answer["content"])
        if self._path == CHAT:
            tools = [{"type": "function", "function": f} for f in FUNCTIONS]
            answer = ask(self._http, self._path, {"messages": self._history, "tools": tools, **fields})
            return self._message(answer["choices"][0]["message"])
        tools = [{"type": "function", "strict": False, **f} for f in FUNCTIONS]
        answer = ask(self._http, self._path, {"input": self._history, "tools": tools, **fields})
        return self._items(answer["output"])

    def _message(self, message: Any) -> Any:
        calls = message.get("tool_calls") or []
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": RESULTS[call["function"]["name"]]} for call in calls
        ]
        self._history += [message, *reversed(results)]
        made = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
        return message["content"] or "", message.get("reasoning_content") or "", made

    def _blocks(self, blocks: list[Any]) -> Any:
        calls = [block for block in blocks if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": c["id"], "content": RESULTS[c["name"]]} for c in calls]
        self._history += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results[::-1]}]
        thought = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
        said = "".join(block["text"] for block in blocks if block["type"] == "text")
        return said, thought, [(call["name"], call["input"]) for call in calls]

    def _items(self, items: list[Any]) -> Any:
        calls = [item for item in items if item["type"] == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": c["call_id"], "output": RESULTS[c["name"]]} for c in calls
        ]
        self._history += [*items, *reversed(results)]
        texts = {
            kind: "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])
            for kind in ("message", "reasoning")
        }
        made = [(call["name"], json.loads(call["arguments"])) for call in calls]
        return texts["message"], texts["reasoning"], made


@pytest.mark.parametrize("path", DIALECTS)
def test_each_prompt_begins_with_the_last_and_what_the_model_wrote(
    engine: FakeEngine, notation: str, path: str
) -> None:
    model, client = Model(engine, notation), Client(client_of(engine), path)
    shown = ""
    for text, thought, calls in (("I look.", "Both.", FIRST), ("Once more.", "One.", SECOND), ("Done.", "Well.", [])):
        written = model.says(text, thought, calls)
        assert client.asks() == (text, thought, calls)
        assert prompt(engine).startswith(shown)
        shown = prompt(engine) + written


TAGGED = "xml", "seed", "dsml", "dsml4", "muse"  # forced calls of these families are JSON in tags of all models


def test_a_forced_call_may_be_written_as_the_template_shows_it_or_as_json(engine: FakeEngine, notation: str) -> None:
    model, client = Model(engine, notation), Client(client_of(engine), CHAT)
    written = model.says("", "", SECOND)
    if notation in TAGGED:
        (name, arguments), *_ = SECOND
        written = f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'
    client.asks(tool_choice="required")
    tokenizer, request = engine.pair.tokenizer, engine.requests[-1]
    assert request.constraint is not None
    state = Grammars(tokenizer, frozenset()).state(request.constraint, frozenset(request.stop_token_ids))
    for token in tokenizer.encode(written.lstrip("\n"), add_special_tokens=False):
        mask = state.mask(len(tokenizer))
        assert mask[token], tokenizer.decode([token])
        state.accept(token)
