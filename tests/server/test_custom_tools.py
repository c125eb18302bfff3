"""OpenAI's custom tools, whose grammar every call follows, and its search for deferred tools."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from openai.types.chat import ChatCompletion
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from starlette.testclient import TestClient
from tokenizers import AddedToken

from mlx_specprefill import Constraint
from mlx_specprefill.choosing.constraints import Grammars
from mlx_specprefill_server.anthropic.messages import MessageAnswer
from mlx_specprefill_server.anthropic.protocol import MessagesRequest
from mlx_specprefill_server.http.errors import JsonResponse
from mlx_specprefill_server.models.service import Service
from mlx_specprefill_server.notations.deepseek import MARKS as DEEPSEEK
from mlx_specprefill_server.notations.gemma import GEMMA_4
from mlx_specprefill_server.notations.harmony import HEADER as HARMONY
from mlx_specprefill_server.notations.kimi import MARKS as KIMI
from mlx_specprefill_server.openai.chat import ChatAnswer, ChatRequest
from mlx_specprefill_server.openai.custom_tools import input_pattern
from mlx_specprefill_server.openai.responses import ResponsesAnswer
from mlx_specprefill_server.openai.responses_protocol import ResponsesRequest
from mlx_specprefill_server.prompt.deferred import HEADER
from mlx_specprefill_server.settings.server import Settings
from tests.support.examples import examples

from .calling import called, engine_that_sees_all, prompts
from .canned_answers import Given, done, named_events, streamed
from .conftest import client_of, events
from .fakes import FakeEngine, FakePair
from .form_templates import FORMS
from .notations import NOTATIONS
from .parsers.reading import STRING, tool
from .test_messages import accumulated
from .test_responses import checked

RESPONSES = "/v1/responses"
EVENTS: Any = TypeAdapter(ResponseStreamEvent)
DEMO = Path(__file__).parents[2] / "models" / "demo" / "target"

# Codex's own, codex-rs/core/src/tools/handlers/tool_apply_patch.lark
PATCH = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
APPLY = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": PATCH},
}
SHELL = {"type": "function", "name": "exec_command", "parameters": {"type": "object"}}
GOOD = "*** Begin Patch\n*** Update File: a.py\n@@ def f():\n-    x = \"1\"\n+    x = 'ü\\n'\n*** End Patch\n"


def is_patch(text: str) -> bool:
    """Read line by line, without the grammar."""
    lines = text.removesuffix("\n").split("\n")
    if len(lines) < 3 or lines[0] != "*** Begin Patch" or lines[-1] != "*** End Patch":
        return False
    state, added = "", 0
    for line in [*lines[1:-1], "*** Delete File: end"]:
        if match := re.fullmatch(r"\*\*\* (Add|Delete|Update) File: .+", line):
            if state == "Add" and not added:
                return False
            state, added = match[1], 0
        elif state == "Add" and line.startswith("+"):
            added += 1
        elif state == "Update" and line.startswith("*** Move to: ") and len(line) > 13:
            state = "Moved"
        elif state in ("Update", "Moved", "Change") and re.fullmatch(r"@@|@@ .+|[-+ ].*", line):
            state = "Change"
        elif state == "Change" and line == "*** End of File":
            state = "Ended"
        else:
            return False
    return True


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with engine_that_sees_all() as fake:
        yield fake


def ask(client: TestClient, status: int = 200, **body: Any) -> Any:
    answer = client.post(RESPONSES, json={"input": "Edit it.", **body})
    assert answer.status_code == status, answer.text
    return answer.json()


# --- grammars ---------------------------------------------------------------------------------------------------------

START = "start: begin_patch hunk+ end_patch"
SEVERAL = 'start: begin_patch environment_id? hunk+ end_patch\nenvironment_id: "*** Environment ID: " filename LF'


@pytest.mark.parametrize("written", [PATCH, "# a comment\n" + PATCH.strip().replace("\n", "  \r\n ")])
@pytest.mark.parametrize("several", [False, True], ids=["one environment", "several"])
def test_the_grammar_of_codex_is_known_by_its_text(written: str, several: bool) -> None:
    grammar = written.replace(START, SEVERAL) if several else written
    pattern = input_pattern(form(type="grammar", syntax="lark", definition=grammar), "tools[0]") or ""
    assert all(re.fullmatch(pattern, text) for text in (GOOD, GOOD.strip(), GOOD.replace("@@ def f():", "@@")))
    assert not any(re.fullmatch(pattern, text) for text in (GOOD.replace("+", "x"), GOOD[5:], ""))
    named = GOOD.replace("Patch\n", "Patch\n*** Environment ID: e\n", 1)
    assert bool(re.fullmatch(pattern, named)) is several


@pytest.mark.parametrize(
    "grammar", ['start: a\na: b b\nb: a a|a a|a a|a a|a|"x"', PATCH.replace("hunk+", "hunk*"), "begin: /a/", ""]
)
def test_other_lark_grammars_are_named_and_not_even_read(client: TestClient, engine: FakeEngine, grammar: str) -> None:
    body = ask(client, tools=[form(type="grammar", syntax="lark", definition=grammar)])
    (warning,) = body["warnings"]
    assert warning.startswith("tools[0].format: the grammar of apply_patch is not enforced: of lark only")
    assert engine.requests[0].constraint is None


def form(**fields: str) -> dict[str, Any]:
    return {**APPLY, "format": fields}


@pytest.mark.parametrize("kind", ["xml", ""])
def test_a_format_that_is_not_known_is_named(client: TestClient, engine: FakeEngine, kind: str) -> None:
    body = ask(client, tools=[form(type=kind, definition="x")])
    assert body["warnings"] == [f"tools[0].format: the grammar of apply_patch is not enforced: its type {kind!r} is "
                                "neither text nor grammar"]  # fmt: skip
    assert "warnings" not in ask(client, tools=[form(type="text")])


@pytest.mark.parametrize(
    ("pattern", "text", "other"), [(r"^[0-9]+\$", "5$", "5"), (r"[0-9]+\\$", "5\\", "5\\$"), ("^a|b$", "b", "c")]
)
def test_anchors_of_a_regular_expression_are_left_out(pattern: str, text: str, other: str) -> None:
    whole = input_pattern(form(type="grammar", syntax="regex", definition=pattern), "tools[0]")
    assert whole is not None
    assert re.fullmatch(whole, text)
    assert not re.fullmatch(whole, other)


# --- calls ------------------------------------------------------------------------------------------------------------


def test_a_custom_tool_is_a_function_with_one_text(client: TestClient, engine: FakeEngine) -> None:
    engine.says(called("apply_patch", input=GOOD))
    body = ask(client, tools=[APPLY, SHELL])
    Response.model_validate(body)
    (item,) = body["output"]
    wanted = {"type": "custom_tool_call", "name": "apply_patch", "input": GOOD, "status": "completed"}
    assert item.items() >= wanted.items()
    assert "Edits files." in prompts(engine)[0]
    assert "Begin Patch" not in prompts(engine)[0]


def test_its_events(client: TestClient, engine: FakeEngine) -> None:
    engine.says(called("apply_patch", input=GOOD))
    answer = client.post(RESPONSES, json={"input": "Edit it.", "tools": [APPLY], "stream": True})
    events = named_events(answer.text)
    for event in events:
        EVENTS.validate_python(event)
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    (done,) = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert len(deltas) > 20
    assert "".join(deltas) == done["input"] == GOOD
    assert not any("function_call" in event["type"] for event in events)


TEXTS = st.text(alphabet='ab"\\/\n\té🎉 {}:,', max_size=8)
VALUES = TEXTS | st.lists(TEXTS, max_size=2) | st.none() | st.integers() | st.dictionaries(TEXTS, TEXTS, max_size=1)
MEMBERS = st.dictionaries(st.sampled_from(["input", "explanation", "cmd"]), VALUES, max_size=3)
KINDS = {"custom": {}, "function": {"parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with engine_that_sees_all() as fake:
        yield Service(fake, Settings())


@pytest.mark.parametrize("notation", NOTATIONS)
@settings(max_examples=examples(20))
@given(members=MEMBERS, cuts=st.lists(st.integers(1, 150), max_size=9), kind=st.sampled_from(sorted(KINDS)))
def test_a_stream_says_what_a_whole_answer_says(
    service: Service, notation: str, members: Any, cuts: list[int], kind: str
) -> None:
    parser, text = NOTATIONS[notation].format.parser([tool("f", input=STRING)], ""), NOTATIONS[notation].write(members)
    ends = sorted({cut for cut in cuts if cut < len(text)} | {len(text)})
    read = [delta for a, b in pairwise([0, *ends]) for delta in parser.push(text[a:b])]
    answer = Given([*read, *parser.finish(True), done("tool_calls")])
    function = {"name": "f", **KINDS[kind]}

    response = ResponsesRequest(input="Hi", tools=[{"type": kind, **function}])
    sent = checked(streamed(ResponsesAnswer(service, response, answer).stream()))[-1]["response"]
    whole = asyncio.run(ResponsesAnswer(service, response, answer).collect())
    assert [item | {"id": ""} for item in sent["output"]] == [item | {"id": ""} for item in whole["output"]]

    message = MessagesRequest(messages=[EDIT], max_tokens=10)
    blocks = accumulated(streamed(MessageAnswer(service, message, answer).stream())).to_dict(mode="json")["content"]
    whole = asyncio.run(MessageAnswer(service, message, answer).collect())
    assert blocks == json.loads(JsonResponse(whole).body)["content"]

    chat = ChatRequest(messages=[EDIT], tools=[{"type": kind, kind: function}])
    whole = asyncio.run(ChatAnswer(service, chat, answer).collect())
    assert joined(ChatAnswer(service, chat, answer), kind) == whole["choices"][0]["message"].get("tool_calls", [])


def joined(answer: ChatAnswer, kind: str) -> list[dict[str, Any]]:
    """Return the calls of a stream, as clients join them."""

    async def read() -> bytes:
        return b"".join([chunk async for chunk in answer.stream()])

    calls: list[dict[str, Any]] = []
    for chunk in events(asyncio.run(read()).decode())[:-1]:
        for call in chunk["choices"][0]["delta"].get("tool_calls", ()):
            if "id" in call:
                calls.append({member: value for member, value in call.items() if member != "index"})
            else:
                for member, text in call[kind].items():
                    calls[call["index"]][kind][member] += text
    return calls


def test_history_is_read_back(client: TestClient, engine: FakeEngine) -> None:
    items = [
        {"role": "user", "content": "Edit it."},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": GOOD},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "Done!"},
    ]
    ask(client, input=items, tools=[APPLY])
    text = prompts(engine)[0]
    assert f"<call>apply_patch {json.dumps({'input': GOOD}, ensure_ascii=False)}</call>" in text
    assert "<|im_start|>tool\nDone!" in text


def test_a_choice_of_it_forces_its_grammar(client: TestClient, engine: FakeEngine) -> None:
    ask(client, tools=[APPLY, SHELL], tool_choice={"type": "custom", "name": "apply_patch"})
    constraint = engine.requests[0].constraint
    assert constraint is not None
    assert "Begin Patch" in constraint.grammar
    assert "exec_command" not in constraint.grammar


def test_tools_of_the_provider_are_named(client: TestClient, engine: FakeEngine) -> None:
    kinds = ["web_search", "local_shell", "image_generation"]
    body = ask(client, tools=[SHELL, *({"type": kind} for kind in kinds)])
    assert [warning.split("'")[1] for warning in body["warnings"]] == kinds


def test_what_tools_of_the_provider_have_left_behind_is_named(client: TestClient, engine: FakeEngine) -> None:
    items = [
        {"role": "user", "content": "Edit it."},
        *({"type": kind, "call_id": "s"} for kind in ("local_shell_call", "local_shell_call_output")),
        {"type": "local_shell_call"},
        {"type": "additional_tools", "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]},
    ]
    warnings = ask(client, input=items, tools=[SHELL])["warnings"]
    assert [warning.split(" was")[0] for warning in warnings] == [
        "input[4].tools[0].tools[0]: 'mcp'",
        "input[1]: 'local_shell_call'",
        "input[2]: 'local_shell_call_output'",
    ]


def test_an_input_of_what_is_left_out_alone_is_refused_by_its_names(client: TestClient) -> None:
    items = [{"type": "web_search_call", "id": "w"}, {"type": "mcp_list_tools", "id": "m", "tools": []}]
    for body in ({"input": items}, {"input": items, "tools": [SHELL, {"type": "web_search"}]}):
        answer = client.post(RESPONSES, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "input")
        assert all(f"input[{i}]: {item['type']!r} was left out" in error["message"] for i, item in enumerate(items))
        assert "empty" not in error["message"]
    answer = client.post(RESPONSES, json={"input": items, "instructions": "Say hi."}).json()
    assert [warning.split("'")[1] for warning in answer["warnings"]] == [item["type"] for item in items]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_the_limit_cuts_is_never_told_as_complete(
    client: TestClient, engine: FakeEngine, stream: bool
) -> None:
    engine.says(called("apply_patch", input=GOOD))
    body = {"input": "Edit it.", "tools": [APPLY], "max_output_tokens": 70, "stream": stream}
    answer = client.post(RESPONSES, json=body)
    events_of = named_events(answer.text) if stream else []
    response = events_of[-1]["response"] if stream else answer.json()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item for item in response["output"] if item["status"] == "completed"] == []
    assert "response.completed" not in [event["type"] for event in events_of]


# --- in chat completions ----------------------------------------------------------------------------------------------

CHAT = "/v1/chat/completions"
EDIT = {"role": "user", "content": "Edit it."}
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": PATCH}}
CHAT_APPLY = {"type": "custom", "custom": {"name": "apply_patch", "description": "Edits files.", "format": GRAMMAR}}


def chat(client: TestClient, status: int = 200, **body: Any) -> Any:
    answer = client.post(CHAT, json={"messages": [EDIT], "tools": [CHAT_APPLY], **body})
    assert answer.status_code == status, answer.text
    return answer


def test_chat_completions_have_them_too(client: TestClient, engine: FakeEngine) -> None:
    engine.says(called("apply_patch", input=GOOD) + called("other", x=1))
    body = chat(client).json()
    ChatCompletion.model_validate(body, strict=True)
    custom, function = body["choices"][0]["message"]["tool_calls"]
    wanted = {"id": custom["id"], "type": "custom", "custom": {"name": "apply_patch", "input": GOOD}}
    assert (custom, function["type"]) == (wanted, "function")
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    result = {"role": "tool", "tool_call_id": custom["id"], "content": "Done!"}
    chat(client, messages=[EDIT, {"role": "assistant", "tool_calls": [custom]}, result])
    assert "Edits files." in prompts(engine)[0]
    assert f"<call>apply_patch {json.dumps({'input': GOOD}, ensure_ascii=False)}</call>" in prompts(engine)[1]


def test_their_calls_are_read_where_the_tools_are_gone(client: TestClient, engine: FakeEngine) -> None:
    """Agents send no tools with the request that sums a session up."""
    made = {"id": "c", "type": "custom", "custom": {"name": "apply_patch", "input": GOOD}}
    chat(client, messages=[EDIT, {"role": "assistant", "tool_calls": [made]}], tools=[])
    assert f"<call>apply_patch {json.dumps({'input': GOOD}, ensure_ascii=False)}</call>" in prompts(engine)[0]


@pytest.mark.parametrize(("custom", "field"), [(None, ""), ({"name": "x"}, ".input"), ({"input": "x"}, ".name")])
def test_their_calls_without_a_part_are_refused_by_name(client: TestClient, custom: Any, field: str) -> None:
    body = chat(
        client, 400, messages=[EDIT, {"role": "assistant", "tool_calls": [{"type": "custom", "custom": custom}]}]
    )
    assert body.json()["error"]["param"] == f"messages[1].tool_calls[0].custom{field}"


def test_their_chunks(client: TestClient, engine: FakeEngine) -> None:
    engine.says(called("apply_patch", input=GOOD))
    chunks = events(chat(client, stream=True).text)[:-1]
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert calls[0].items() >= {"index": 0, "type": "custom"}.items()
    assert calls[0]["custom"] == {"name": "apply_patch", "input": ""}
    assert len(calls) > 20
    assert "".join(call["custom"]["input"] for call in calls) == GOOD


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "apply_patch"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "custom", "custom": {"name": "apply_patch"}}],
            },
        },
    ],
)
def test_their_grammar_is_forced(client: TestClient, engine: FakeEngine, choice: Any) -> None:
    chat(client, tools=[CHAT_APPLY, {"type": "function", "function": {"name": "other"}}], tool_choice=choice)
    constraint = engine.requests[0].constraint
    assert constraint is not None
    assert "Begin Patch" in constraint.grammar
    assert "other" not in constraint.grammar


def test_what_is_left_out_there_is_named(client: TestClient, engine: FakeEngine) -> None:
    unknown = {"type": "grammar", "grammar": {"definition": "x", "syntax": "q"}}
    tools = [{"type": "web_search"}, {"type": 5}, {"type": "custom", "custom": {"name": "b", "format": unknown}}]
    warnings = chat(client, tools=tools).json()["warnings"]
    for text, warning in zip(["'web_search'", "5", "the grammar of b"], warnings, strict=True):
        assert text in warning
    assert engine.requests[0].constraint is None


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"type": "custom"}, "tools[0].custom"),
        ({"type": "custom", "custom": "x"}, "tools[0].custom"),
        ({"type": "custom", "custom": {}}, "tools[0].custom.name"),
        ({"type": "custom", "custom": {"name": "x", "format": 5}}, "tools[0].custom.format"),
        (
            {"type": "custom", "custom": {"name": "x", "format": {"type": "grammar", "grammar": {"syntax": "lark"}}}},
            "tools[0].custom.format",
        ),
    ],
)
def test_a_custom_tool_without_its_parts_is_refused_by_name(client: TestClient, tool: Any, field: str) -> None:
    assert chat(client, 400, tools=[tool]).json()["error"]["param"].startswith(field)


# --- the search for deferred tools ------------------------------------------------------------------------------------

WEATHER = {"type": "function", "name": "get_weather", "description": "Tells the weather.", "parameters": None}
MAPS = {"type": "namespace", "name": "maps", "description": "Maps.", "tools": [
    {"type": "function", "name": "find_route", "description": "Finds a way.", "defer_loading": True}]}  # fmt: skip
LATER = [SHELL, {**WEATHER, "defer_loading": True}, MAPS]
OWN = {"type": "tool_search", "execution": "client", "description": "Searches.", "parameters": {"type": "object"}}


def test_deferred_tools_wait_for_a_search(client: TestClient, engine: FakeEngine) -> None:
    ask(client, tools=[*LATER, OWN])
    ask(client, tools=[SHELL, OWN])
    ask(client, tools=LATER)
    first, second, without = prompts(engine)
    assert first == second
    assert "get_weather" in without  # nothing could load it
    assert "find_route" in without


def test_the_clients_search(client: TestClient, engine: FakeEngine) -> None:
    engine.says(called("tool_search", goal="a way"))
    body = ask(client, tools=[*LATER, OWN])
    Response.model_validate(body)
    (item,) = body["output"]
    wanted = {"type": "tool_search_call", "execution": "client", "arguments": {"goal": "a way"}, "status": "completed"}
    assert item.items() >= wanted.items()
    found = {"type": "tool_search_output", "call_id": item["call_id"], "execution": "client", "tools": [MAPS]}
    history = [{"role": "user", "content": "Edit it."}, item, found]
    engine.says(called("find_route", to="Rome"))
    body = ask(client, input=history, tools=[*LATER, OWN])
    first, second = prompts(engine)
    assert second.startswith(first.removesuffix("<|im_start|>assistant\n"))
    assert f"<|im_start|>tool\n{HEADER}\n<tool>" in second
    assert "get_weather" not in second
    (item,) = body["output"]
    assert (item["name"], item["namespace"]) == ("find_route", "maps")
    assert "warnings" not in body


def test_a_search_by_the_server_is_left_out_and_no_tool_is_lost(client: TestClient, engine: FakeEngine) -> None:
    searched = [
        {"type": "tool_search_call", "execution": "server", "call_id": None, "arguments": {"paths": ["get_weather"]}},
        {"type": "tool_search_output", "execution": "server", "call_id": None, "tools": [WEATHER]},
    ]
    items = [{"role": "user", "content": "Edit it."}, *searched]
    warnings = ask(client, input=items, tools=[*LATER, {"type": "tool_search"}])["warnings"]
    assert [warning.split(" was")[0] for warning in warnings] == [
        "tools[3]: 'tool_search'",
        "input[1]: 'tool_search_call'",
        "input[2]: 'tool_search_output'",
    ]
    ask(client, tools=[*LATER, {"type": "tool_search"}])
    assert all("get_weather" in prompt and "find_route" in prompt for prompt in prompts(engine))


def test_functions_of_one_name_in_two_namespaces_are_told_apart(client: TestClient, engine: FakeEngine) -> None:
    spaces = [{**MAPS, "name": name, "tools": [{**MAPS["tools"][0], "description": name}]} for name in ("land", "sea")]
    engine.says(called("sea__find_route") + called("find_route"))
    body = ask(client, tools=spaces)
    assert [(item["namespace"], item["name"]) for item in body["output"]] == [
        ("sea", "find_route"),
        ("land", "find_route"),
    ]
    found = {"type": "tool_search_output", "call_id": "s", "tools": spaces}
    ask(client, input=[{"role": "user", "content": "Edit it."}, *body["output"]], tools=spaces)
    ask(client, input=[{"role": "user", "content": "Edit it."}, found], tools=[*spaces, OWN])
    assert "<call>sea__find_route {}</call><call>find_route {}</call>" in prompts(engine)[1]
    for text in prompts(engine):
        assert text.index('"find_route", "description": "land"') < text.index('"sea__find_route", "description": "sea"')


def test_additional_tools_stand_where_they_come(client: TestClient, engine: FakeEngine) -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": [WEATHER, APPLY]}
    history = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}, more]
    engine.says(called("apply_patch", input=GOOD))
    ask(client, input=history[:2], tools=[SHELL])
    body = ask(client, input=[*history, {"role": "user", "content": "Edit it."}], tools=[SHELL])
    before, after = prompts(engine)
    assert after.startswith(before.removesuffix("<|im_start|>assistant\n"))
    assert after.index("Yes?") < after.index("Tells the weather.") < after.index("Edit it.")
    assert body["output"][0]["type"] == "custom_tool_call"


# --- patches, sampled -------------------------------------------------------------------------------------------------


FORCED = {"type": "custom", "name": "apply_patch"}
HERMES, TAGS = FORMS["no calls, trained on tags"], "{#- <function= #}" + FORMS["no calls, trained on tags"]
OPENED = {
    HERMES: 'I edit it.\n<tool_call>\n{"name": "apply_patch", "argum',
    TAGS: "I edit it.\n<tool_call>\n<function=apply_patch>\n<par",
}
CALLED = {
    HERMES: re.compile(r'"arguments": ?\{"input": ?"(.*)"\}\}\n?</tool_call>', re.DOTALL),
    TAGS: re.compile(r"<parameter=input>\n(.*?)\n</parameter>\n</function>\n</tool_call>", re.DOTALL),
}
SAMPLES = 50
ENDS = {"\\": 60, "\n": 40, '"': 60, "n": 20, "E": 5, "*": 5, "<": 5}


@cache
def tokenizer(template: str = HERMES) -> Any:
    """The demo pair's, with the marks of calls as tokens, as real vocabularies have them."""
    loaded = load_tokenizer(DEMO)
    loaded._tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in ("<tool_call>", "</tool_call>")])
    loaded._tokenizer.chat_template = template
    return TokenizerWrapper(loaded._tokenizer)


@cache
def texts() -> list[str]:
    return [tokenizer().decode([token]) for token in range(len(tokenizer()))]


class Constrained(NamedTuple):
    """The grammar that a server gives the engine, and how the answer begins."""

    grammars: Grammars
    constraint: Constraint
    opened: str
    called: re.Pattern[str]


@cache
def constrained(choice: Any, template: str = HERMES) -> Constrained:
    wanted = FORCED if choice == "forced" else choice
    fake = FakeEngine(FakePair(tokenizer(template), 16_384))
    try:
        body = ask(client_of(fake), tools=[APPLY, SHELL], tool_choice=wanted)
        assert "warnings" not in body
        constraint = fake.requests[0].constraint
    finally:
        fake.close()
    assert constraint is not None
    opened = OPENED[template] * (choice == "auto")
    return Constrained(Grammars(tokenizer(), frozenset()), constraint, opened, CALLED[template if opened else HERMES])


def fed(given: Constrained, text: str) -> Any:
    """The state behind a text, each of whose tokens was permitted."""
    state = given.grammars.state(given.constraint, frozenset({tokenizer().eos_token_id}))
    for token in tokenizer().encode(text, add_special_tokens=False):
        assert state.mask(len(tokenizer()))[token], text
        state.accept(token)
    return state


@cache
def firsts() -> Any:
    """The first character of each token's text, as a number."""
    return np.array([ord(text[:1] or "?") for text in texts()])


def likely(mask: Any) -> Any:
    """Weights of tokens: their first characters are equally likely, but lines, texts and patches end more often."""
    weights = mask / np.maximum(np.bincount(firsts(), mask), 1)[firsts()]
    for character, factor in ENDS.items():
        weights[firsts() == ord(character)] *= factor
    return weights


def sampled(given: Constrained, seed: int) -> str:
    """A random answer within the grammar."""
    state, generator = fed(given, given.opened), np.random.default_rng(seed)
    ids = tokenizer().encode(given.opened, add_special_tokens=False)
    for _ in range(1500):
        sums = np.cumsum(likely(state.mask(len(tokenizer()))))
        token = int(np.searchsorted(sums, generator.random() * sums[-1], side="right"))
        if token == tokenizer().eos_token_id:
            break
        ids.append(token)
        state.accept(token)
        if texts()[token] == "</tool_call>":
            break
    return str(tokenizer().decode(ids))


@pytest.mark.parametrize("template", [HERMES, pytest.param(TAGS, marks=pytest.mark.extended)], ids=["JSON", "tags"])
@pytest.mark.parametrize("choice", ["auto", "forced"])
def test_sampled_patches_are_well_formed(choice: str, template: str) -> None:
    """Fifty patches of each notation, half of them in the calls that a client forces."""
    given = constrained(choice, template)
    is_json = template == HERMES or choice == "forced"
    for seed in range(SAMPLES // 2):
        text = sampled(given, seed)
        match = given.called.search(text)
        assert match is not None, text
        patch = json.loads(f'"{match[1]}"') if is_json else match[1]
        assert is_patch(patch), text


@pytest.mark.parametrize(
    "text",
    [
        "Nothing to do: *** Begin Patch is a mark, and so is </tool_call>.",
        '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "apply_patch <<X"}}\n</tool_call>',
        f"{called('apply_patch', input=GOOD)}\nAnd again.\n{called('apply_patch', input=GOOD)}",
    ],
)
def test_all_other_text_is_free(text: str) -> None:
    assert fed(constrained("auto"), text).mask(len(tokenizer()))[tokenizer().eos_token_id]


# (notation, its marks, a call of apply_patch, another call)
OTHER_MARKS = [
    (
        "HERMES",
        ["<tool_call>", "</tool_call>"],
        '<tool_call>\n{"name": "apply_patch", "arguments": {"input": "PATCH"}}\n</tool_call>',
        '<tool_call>\n{"name": "apply_patch_v2", "arguments": {}}\n</tool_call>',
    ),
    (
        "GLM",  # as it is, the name is that of an architecture, of which fewer are tested
        ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
        "<tool_call>apply_patch<arg_key>input</arg_key><arg_value>RAW</arg_value></tool_call>",
        "<tool_call>apply_patch_v2<arg_key>a</arg_key><arg_value>b</arg_value></tool_call>",
    ),
    (
        "MINIMAX",
        ["<minimax:tool_call>", "</minimax:tool_call>"],
        '<minimax:tool_call>\n<invoke name="apply_patch">\n<parameter name="input">RAW</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="apply_patch_v2">\n</invoke>\n</minimax:tool_call>',
    ),
    (
        "MISTRAL",
        ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
        '[TOOL_CALLS]apply_patch[ARGS]{"input": "PATCH"}',
        '[TOOL_CALLS]exec_command[CALL_ID]123456789[ARGS]{"cmd": "ls"}',
    ),
    (
        "KIMI",
        [*KIMI],
        f'{KIMI.section}{KIMI.call}functions.apply_patch:0{KIMI.arguments}{{"input": "PATCH"}}{KIMI.end_call}'
        f"{KIMI.end_section}",
        f'{KIMI.section}{KIMI.call}functions.exec_command:0{KIMI.arguments}{{"cmd": "ls"}}{KIMI.end_call}'
        f"{KIMI.end_section}",
    ),
    (
        "DEEPSEEK",
        [*DEEPSEEK],
        f'{DEEPSEEK.section}{DEEPSEEK.call}apply_patch{DEEPSEEK.arguments}{{"input": "PATCH"}}{DEEPSEEK.end_call}'
        f"{DEEPSEEK.end_section}",
        f'{DEEPSEEK.section}{DEEPSEEK.call}exec_command{DEEPSEEK.arguments}{{"cmd": "ls"}}{DEEPSEEK.end_call}'
        f"{DEEPSEEK.end_section}",
    ),
    (
        "GEMMA",
        [*GEMMA_4],
        '<|tool_call>call:apply_patch{input:<|"|>RAW<|"|>}<tool_call|>',
        "<|tool_call>call:apply_patch_v2{}<tool_call|>",
    ),
    (
        "HARMONY",
        [*HARMONY, "<|end|>", "<|call|>"],
        '<|channel|>commentary to=functions.apply_patch <|constrain|>json<|message|>{"input": "PATCH"}<|call|>',
        "<|channel|>commentary to=functions.apply_patch_v2 <|constrain|>json<|message|>{}<|call|>",
    ),
    (
        "HARMONY, recipient first",
        [*HARMONY, "<|end|>", "<|call|>"],
        "<|channel|>analysis<|message|>They say to=functions.apply_patch.<|end|>"
        '<|start|>assistant to=functions.apply_patch<|channel|>commentary json<|message|>{"input": "PATCH"}<|call|>',
        '<|start|>assistant to=functions.exec_command<|channel|>commentary json<|message|>{"cmd": "ls"}<|call|>',
    ),
]


@pytest.mark.parametrize(("notation", "marks", "patch", "other"), OTHER_MARKS, ids=[given[0] for given in OTHER_MARKS])
def test_calls_in_other_notations_follow_their_grammar(notation: str, marks: list[str], patch: str, other: str) -> None:
    loaded = load_tokenizer(DEMO)
    loaded._tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    loaded._tokenizer.chat_template = HERMES
    wrapped = TokenizerWrapper(loaded._tokenizer)
    fake = FakeEngine(FakePair(wrapped, 16_384))
    body = ask(client_of(fake, tool_parser=notation.partition(",")[0].lower()), tools=[APPLY, SHELL])
    fake.close()
    assert "warnings" not in body
    (request,) = fake.requests
    assert request.constraint is not None
    state = Grammars(wrapped, frozenset()).state(request.constraint, frozenset({wrapped.eos_token_id}))

    def accepts(text: str) -> bool:
        now = state.fork()
        for token in wrapped.encode(text, add_special_tokens=False):
            if not now.mask(len(wrapped))[token]:
                return False
            now.accept(token)
        return bool(now.mask(len(wrapped))[wrapped.eos_token_id])

    good = patch.replace("PATCH", json.dumps(GOOD, ensure_ascii=False)[1:-1]).replace("RAW", GOOD)
    assert accepts(f"I edit.{good}")
    assert accepts(other)
    assert accepts("No call of apply_patch.")
    assert not accepts(patch.replace("PATCH", "Nothing.").replace("RAW", "Nothing."))
    assert not accepts(other + good.replace("Begin", "End"))


def test_a_notation_without_marks_that_are_tokens_says_that_such_calls_are_free() -> None:
    fake = FakeEngine(FakePair(tokenizer(), 16_384))
    body = ask(client_of(fake, tool_parser="granite"), tools=[APPLY])
    fake.close()
    assert body["warnings"] == [
        "tools: in this model's notation the grammar of apply_patch is enforced in forced calls only"
    ]
    assert fake.requests[0].constraint is None


def test_free_text_beside_such_a_tool_is_guarded_against_loops() -> None:
    fake = FakeEngine(FakePair(tokenizer(), 16_384))
    fake.says("so it goes and so " * 200)
    body = ask(client_of(fake), tools=[APPLY])
    fake.close()
    assert fake.requests[0].constraint is not None
    assert body["specprefill"]["ended"].startswith("loop: ")


def test_a_call_with_a_grammar_may_repeat_itself() -> None:
    fake = FakeEngine(FakePair(tokenizer(), 16_384))
    fake.says(called("apply_patch", input=GOOD.replace("@@ def f():\n", "@@ def f():\n" + " pass\n" * 300)))
    body = ask(client_of(fake), tools=[APPLY])
    fake.close()
    assert "ended" not in body["specprefill"]


def test_a_call_can_not_end_before_its_patch() -> None:
    state = fed(constrained("auto"), f'{OPENED[HERMES]}ents": {{"input": "*** Begin Patch\\n*** Delete File: a\\n')
    allowed = state.mask(len(tokenizer()))
    assert not allowed[tokenizer().eos_token_id]
    (quote,) = tokenizer().encode('"', add_special_tokens=False)
    assert not allowed[quote]
