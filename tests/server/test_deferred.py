"""Tools that are loaded when needed: not in the prompt until a result names them, then as the template writes them."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any
from uuid import uuid4

import pytest
from starlette.testclient import TestClient

from mlx_specprefill import CacheLabel
from mlx_specprefill_server.http import body_room
from mlx_specprefill_server.http.body_room import BodyRoom
from mlx_specprefill_server.models.pool import Models
from mlx_specprefill_server.prompt import stable
from mlx_specprefill_server.prompt.builder import PromptBuilder
from mlx_specprefill_server.prompt.conversation import conversation
from mlx_specprefill_server.prompt.deferred import HEADER
from mlx_specprefill_server.prompt.forms import tools_in
from mlx_specprefill_server.prompt.stable import ToolMemory

from .calling import called, engine_that_sees_all, prompts
from .conftest import client_of
from .fakes import FakeEngine, FakePair, byte_tokenizer
from .form_templates import FORMS
from .test_forms import HIDE_TOOLS

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "A town."}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Tells the weather.", "input_schema": CITY}
STOCKS = {"name": "get_stock", "description": "Tells a price.", "input_schema": {"type": "object"}}
CLOCK = {"name": "clock", "description": "Tells the time.", "input_schema": {"type": "object"}}


def deferred(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "defer_loading": True}


LATER = [CLOCK, deferred(WEATHER), deferred(STOCKS)]
ASKED = {"role": "user", "content": "How is it in Rome?"}
CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "clock", "input": {}}]}


def loads(*names: str) -> dict[str, Any]:
    references = [{"type": "tool_reference", "tool_name": name} for name in names]
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": references}]}


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with engine_that_sees_all() as fake:
        yield fake


def ask(client: TestClient, path: str = MESSAGES, status: int = 200, **body: Any) -> Any:
    answer = client.post(path, json={"max_tokens": 500, **body})
    assert answer.status_code == status, answer.text
    return answer.json()


# --- left out, and loaded ---------------------------------------------------------------------------------------------


def test_deferred_tools_leave_no_trace_in_the_prompt(client: TestClient, engine: FakeEngine) -> None:
    ask(client, messages=[ASKED], tools=LATER)
    ask(client, messages=[ASKED], tools=[CLOCK])
    first, second = prompts(engine)
    assert first == second
    assert "get_weather" not in first


def test_a_reference_shows_the_tool_in_its_result_and_moves_nothing_before(
    client: TestClient, engine: FakeEngine
) -> None:
    ask(client, messages=[ASKED], tools=LATER)
    ask(client, messages=[ASKED, CALLED, loads("get_weather")], tools=LATER)
    ask(client, messages=[ASKED, CALLED, loads("get_weather")], tools=[CLOCK, deferred(WEATHER)])
    ask(client, messages=[ASKED], tools=[CLOCK, WEATHER])
    before, after, alone, in_front = prompts(engine)
    schema = in_front[in_front.rindex("<tool>") : in_front.index("<|im_start|>")].strip()
    assert after.startswith(before)
    assert after.endswith(f"<|im_start|>tool\n{HEADER}\n{schema}<|im_end|>\n<|im_start|>assistant\n")
    assert after == alone  # others that wait change nothing


def test_a_schema_in_a_result_is_kept_in_full(client: TestClient, engine: FakeEngine) -> None:
    ask(client, messages=[ASKED, CALLED, loads("get_weather")], tools=LATER)
    request = engine.requests[0]
    decode = engine.pair.tokenizer.decode
    kinds = [s.kind for s in request.spans if HEADER in decode(list(request.prompt[s.content_start : s.content_end]))]
    assert kinds == ["tools"]


def test_a_tool_is_shown_once(client: TestClient, engine: FakeEngine) -> None:
    again = [CALLED | {"content": [{**CALLED["content"][0], "id": "c2"}]}, loads("get_weather", "clock", "clock")]
    again[1]["content"][0]["tool_use_id"] = "c2"
    ask(client, messages=[ASKED, CALLED, loads("get_weather", "get_weather"), *again], tools=LATER)
    assert prompts(engine)[0].count("Tells the weather.") == prompts(engine)[0].count("already") == 1
    assert "These tools can be called already: get_weather, clock<|im_end|>" in prompts(engine)[0]


def test_without_anything_that_loads_it_a_tool_is_shown(client: TestClient, engine: FakeEngine) -> None:
    ask(client, messages=[ASKED], tools=[deferred(WEATHER)])
    ask(client, messages=[ASKED], tools=[WEATHER])
    first, second = prompts(engine)
    assert first == second


@pytest.mark.parametrize("name", ["get_wether", ""])
def test_an_unknown_reference_is_refused_by_name(client: TestClient, engine: FakeEngine, name: str) -> None:
    body = ask(client, messages=[ASKED, CALLED, loads("get_weather", name)], tools=LATER, status=400)
    message = body["error"]["message"]
    assert "messages[2].content[0].content[1].tool_name" in message
    assert repr(name) in message
    assert not engine.requests


def test_the_report_and_the_metrics_count_what_is_left_out(client: TestClient, engine: FakeEngine) -> None:
    body = ask(client, messages=[ASKED], tools=LATER)
    whole = ask(client, messages=[ASKED], tools=[CLOCK, WEATHER, STOCKS])
    texts = prompts(engine)
    left_out = body["specprefill"]["deferred"]
    assert left_out["tools"] == 2
    assert len(texts[1]) - len(texts[0]) - left_out["tokens"] == 2  # a byte is a token; the separators
    assert "deferred" not in whole["specprefill"]
    metrics = client.get("/metrics").text
    assert f'specprefill_deferred_tokens_total{{model_name="demo/target"}} {float(left_out["tokens"])}' in metrics


# --- what is remembered ----------------------------------------------------------------------------------------------


def texts_below(*roots: Any) -> Iterator[str]:
    """All texts that these objects hold, through however many others."""
    seen, found = set[int](), list(roots)
    while found:
        one = found.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        found += gc.get_referents(one)
        if isinstance(one, str | bytes):
            yield one if isinstance(one, str) else one.decode("utf-8", "replace")


def models_of(client: TestClient) -> Models:
    app: Any = client.app
    models: Models = app.state.models
    return models


def test_nothing_remembers_the_text_of_a_tool_that_waits(client: TestClient, engine: FakeEngine) -> None:
    secret = uuid4().hex
    assert ask(client, messages=[ASKED], tools=[*LATER, deferred({**CLOCK, "name": secret})])["specprefill"]["deferred"]
    service = models_of(client).in_memory(None)
    assert not any(secret in text for text in texts_below(service.prompts, service.tools))


@pytest.mark.parametrize("several", [False, True], ids=["counts", "orders"])
def test_what_is_remembered_of_tools_is_bounded_and_counts_beside_bodies(
    monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    monkeypatch.setattr(stable, "LIMIT", 5000)
    memory, counted = ToolMemory(room := BodyRoom()), list[str]()

    async def count(tools: Sequence[Any]) -> int:
        counted.append(tools[0]["name"])
        return 7

    def remember(name: int, number: int = 10) -> None:
        tools = [{"name": f"{name}", "number": i} for i in range(number)]
        if several:
            assert memory.sort(tools[::-1], CacheLabel()) == memory.sort(tools, CacheLabel())
        else:
            assert asyncio.run(memory.tokens(tools, CacheLabel(), count)) == 7

    for name in range(50):
        remember(name)
        assert 1000 < room.taken <= 5000
    remember(49)
    remember(0)
    assert several or counted == [*map(str, range(50)), "0"]
    monkeypatch.setattr(body_room, "LIMIT", taken := room.taken)
    monkeypatch.setattr(stable, "LIMIT", 50_000)
    asyncio.run(memory.tokens([{"name": "no room"}], CacheLabel(), count))
    assert room.taken == taken
    memory.forget(None)
    assert room.taken == 0


def test_nothing_is_remembered_of_what_is_counted_while_all_is_forgotten() -> None:
    memory = ToolMemory(room := BodyRoom())

    async def count(tools: Sequence[Any]) -> int:
        memory.forget(None)
        return 7

    assert asyncio.run(memory.tokens([{}], CacheLabel(), count)) == 7
    assert room.taken == 0


def test_what_is_remembered_of_tools_is_forgotten_with_the_cache_by_its_owner(engine: FakeEngine) -> None:
    client = client_of(engine, api_keys=("anna", "bert"))
    room = models_of(client).state.bodies
    left = []
    for key in ("anna", "bert"):
        client.headers["authorization"] = f"Bearer {key}"
        ask(client, messages=[ASKED], tools=LATER)
        left.append(room.taken)
    for _ in range(2):
        assert client.delete("/v1/specprefill/cache").status_code == 200
        assert room.taken == left[0] == left[1] / 2
    client.headers["authorization"] = "Bearer anna"
    assert client.delete("/v1/specprefill/cache").status_code == 200
    assert room.taken == 0


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("turns", "warned"), [([], True), ([CALLED, loads("get_weather")], False)])
def test_calls_are_read_and_those_of_tools_that_were_never_loaded_named(
    client: TestClient, engine: FakeEngine, turns: list[Any], warned: bool
) -> None:
    engine.says(called("get_weather", city="Rome"))
    body = ask(client, messages=[ASKED, *turns], tools=LATER)
    (block,) = body["content"]
    assert (block["name"], block["input"], body["stop_reason"]) == ("get_weather", {"city": "Rome"}, "tool_use")
    assert any("get_weather" in warning for warning in body.get("warnings", ())) == warned


def test_forced_calls_know_loaded_tools_only(client: TestClient, engine: FakeEngine) -> None:
    any_of = {"tool_choice": {"type": "any"}, "tools": LATER}
    ask(client, messages=[ASKED], **any_of)
    ask(client, messages=[ASKED, CALLED, loads("get_weather")], **any_of)
    grammars = [request.constraint.grammar for request in engine.requests if request.constraint is not None]
    assert ["get_weather" in grammar for grammar in grammars] == [False, True]
    assert not any("get_stock" in grammar for grammar in grammars)


def test_a_deferred_tool_that_must_be_called_is_shown(client: TestClient, engine: FakeEngine) -> None:
    engine.says(called("get_weather", city="Rome"))
    body = ask(client, messages=[ASKED], tools=LATER, tool_choice={"type": "tool", "name": "get_weather"})
    assert "Tells the weather." in prompts(engine)[0]
    assert "get_stock" not in prompts(engine)[0]
    assert body["specprefill"]["deferred"]["tools"] == 1
    assert "warnings" not in body


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_deferred_tool_that_is_allowed_without_its_search_is_shown(
    client: TestClient, engine: FakeEngine, mode: str
) -> None:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    ask(client, CHAT, messages=[ASKED], tools=chat_tools("find_tools"), tool_choice=choice)
    assert "Tells the weather." in prompts(engine)[0]
    assert "get_stock" not in prompts(engine)[0]


def test_no_choice_of_tools_leaves_the_history_as_it_was(client: TestClient, engine: FakeEngine) -> None:
    ask(client, messages=[ASKED, CALLED, loads("get_weather")], tools=LATER, tool_choice={"type": "none"})
    assert "Tells the weather." in prompts(engine)[0]


# --- what the server does not do --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tool_search_tool_bm25", "tool_search_tool_regex_20251119"])
@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
def test_a_search_by_the_server_is_refused_with_a_way_out(
    client: TestClient, engine: FakeEngine, path: str, kind: str
) -> None:
    body = ask(client, path, 400, messages=[ASKED], tools=[*LATER, {"type": kind, "name": "search"}])
    message = body["error"]["message"]
    assert message.startswith("tools[3].type: ")
    assert "let the client search" in message
    assert "without defer_loading" in message
    assert not engine.requests


def test_what_is_left_out_is_named(client: TestClient) -> None:
    provided = [{"type": "web_search_20250305", "name": "web_search"}]
    told = {"role": "user", "content": [{"type": "tool_reference", "tool_name": "clock"}]}
    body = ask(client, messages=[ASKED, told], tools=[*LATER, *provided])
    for place, kind, warning in zip(
        ["tools[3]", "messages[1].content[0]"],
        ["web_search_20250305", "tool_reference"],
        body["warnings"],
        strict=True,
    ):
        assert warning.startswith(f"{place}: ")
        assert kind in warning


def functions(*tools: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {**{n: t[n] for n in ("name", "description")}, "parameters": t["input_schema"]},
        }
        for t in tools
    ]


# --- chat completions -------------------------------------------------------------------------------------------------


def chat_tools(*loaders: str) -> list[Any]:
    later = functions(WEATHER, STOCKS)
    return [
        *({"type": "function", "function": {"name": name}} for name in loaders),
        {**later[0], "defer_loading": True},
        {**later[1], "function": {**later[1]["function"], "defer_loading": True}},
    ]


def chat(*parts: Any) -> list[Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "find_tools", "arguments": "{}"}}
    return [
        ASKED,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": parts},
    ]


def test_chat_completions_load_by_a_part_of_a_result(client: TestClient, engine: FakeEngine) -> None:
    reference = {"type": "tool_reference", "tool_name": "get_weather"}
    text = {"type": "text", "text": "Found:"}
    ask(client, CHAT, messages=[ASKED], tools=chat_tools("find_tools"))
    ask(client, CHAT, messages=chat(text, reference), tools=chat_tools("find_tools"))
    body = ask(client, CHAT, messages=chat({**reference, "tool_name": "x"}), tools=chat_tools("find_tools"), status=400)
    before, after = prompts(engine)
    assert "get_weather" not in before
    assert f"Found:\n{HEADER}\n<tool>" in after
    assert after.startswith(before.removesuffix("<|im_start|>assistant\n"))
    assert "get_stock" not in after
    assert "defer_loading" not in after
    assert body["error"]["param"] == "messages[2].content[0].tool_name"


@pytest.mark.parametrize("others", [(), ("clock",)])
def test_in_chat_completions_no_tool_is_lost(client: TestClient, engine: FakeEngine, others: tuple[str, ...]) -> None:
    ask(client, CHAT, messages=[ASKED], tools=chat_tools(*others))
    assert "get_weather" in prompts(engine)[0]
    assert "get_stock" in prompts(engine)[0]
    assert "defer_loading" not in prompts(engine)[0]


@pytest.mark.parametrize("value", ["yes", 1, []])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/responses"])
def test_the_flag_is_true_or_false(client: TestClient, engine: FakeEngine, path: str, value: Any) -> None:
    tool = {**WEATHER, "type": "custom"} if path == MESSAGES else functions(WEATHER)[0]
    if path == "/v1/responses":
        tool = {"type": "function", **tool["function"]}
    body = ask(client, path, messages=[ASKED], input="Hi", tools=[{**tool, "defer_loading": value}], status=400)
    assert body["error"]["message"] == "tools[0].defer_loading: must be true or false"


@pytest.mark.parametrize("value", [False, None])
def test_a_flag_that_is_off_leaves_no_trace(client: TestClient, engine: FakeEngine, value: Any) -> None:
    (tool,) = functions(WEATHER)
    within = {**tool, "function": {**tool["function"], "defer_loading": value}}
    for given in (tool, {**tool, "defer_loading": value}, within):
        ask(client, CHAT, messages=[ASKED], tools=[*chat_tools("find_tools")[:1], given])
    assert len(set(prompts(engine))) == 1


@pytest.mark.parametrize("within", [False, True])
def test_custom_tools_wait_too(client: TestClient, engine: FakeEngine, within: bool) -> None:
    flag = {"defer_loading": True}
    tool = {"type": "custom", "custom": {"name": "calc", "description": "Sums.", **(flag if within else {})}, **flag}
    tools = [*chat_tools("find_tools")[:1], tool if not within else {n: tool[n] for n in ("type", "custom")}]
    ask(client, CHAT, messages=[ASKED], tools=tools)
    engine.says(called("calc", input="1+1"))
    body = ask(client, CHAT, messages=chat({"type": "tool_reference", "tool_name": "calc"}), tools=tools)
    assert ["Sums." in prompt for prompt in prompts(engine)] == [False, True]
    assert body["choices"][0]["message"]["tool_calls"][0]["custom"] == {"name": "calc", "input": "1+1"}


def test_a_member_of_our_own_means_nothing_in_a_request(client: TestClient, engine: FakeEngine) -> None:
    plain = chat("x")
    ask(client, CHAT, messages=plain, tools=chat_tools("find_tools"))
    ask(client, CHAT, messages=[*plain[:2], plain[2] | {"loads": ["get_weather"]}], tools=chat_tools("find_tools"))
    assert len(set(prompts(engine))) == 1


# --- every form of template -------------------------------------------------------------------------------------------

ODD = [
    {
        "type": "function",
        "function": {"name": "odd", "parameters": {"properties": {"x": {"type": ["string", "null"]}}}},
    },
    {"type": "function", "function": {"name": "zqother", "description": "d", "parameters": CITY}},
    {"type": "function", "function": {"name": "b", "description": "<tool>\n}, {", "parameters": CITY}},
]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("tool", ODD, ids=["odd", "like the probe", "marks in it"])
def test_a_tool_is_written_as_the_template_writes_it(name: str, tool: Any) -> None:
    builder = PromptBuilder(byte_tokenizer(FORMS[name]))
    first = functions(CLOCK)[0]
    given = conversation([ASKED], [first, tool])
    front = asyncio.run(builder.text(given)) if name not in HIDE_TOOLS else ""
    written = builder._tools.write(tool)
    if front:
        one = asyncio.run(builder.text(conversation([ASKED], [first])))
        assert written in front
        assert len(front) - len(one) - len(written) in (0, 1)  # but for the separator
        assert not written[0].isspace()
    else:
        assert json.loads(written) == tool["function"]
    assert (tools_in(builder.forms[True], [tool]) or [{}])[0]["function"]["name"] in written


MANY = [
    *functions(WEATHER, STOCKS),
    *ODD,
    *(functions({**WEATHER, "name": f"tool_{i}", "description": f"Does {i}."})[0] for i in range(12)),
]
LOADED = {"get_weather", "odd", "tool_7"}


@pytest.mark.parametrize("name", FORMS)
def test_what_waits_changes_no_token_of_what_the_model_sees(engine: FakeEngine, name: str) -> None:
    """Before and after some of many tools are loaded, the prompt is that of a request with only these."""
    engine.pair = FakePair(tokenizer=byte_tokenizer(FORMS[name]))
    client = client_of(engine)
    finder = {"type": "function", "function": {"name": "find_tools", "description": "Finds tools."}}
    waiting = [{**tool, "defer_loading": True} for tool in MANY]
    few = [tool for tool in waiting if tool["function"]["name"] in LOADED]
    loaded = chat(*({"type": "tool_reference", "tool_name": name} for name in LOADED))
    for messages, tools in (([ASKED], waiting), ([ASKED], []), (loaded, waiting), (loaded, few)):
        ask(client, CHAT, messages=messages, tools=[finder, *tools])
    before, bare, after, alone = (list(request.prompt) for request in engine.requests)
    assert before == bare
    assert after == alone
    text = prompts(engine)[2]
    assert "tool_7" in text
    assert "tool_6" not in text
