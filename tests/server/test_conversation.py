from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from mlx_specprefill import InvalidRequestError
from mlx_specprefill_server.prompt.conversation import conversation

USER = {"role": "user", "content": "u"}


def normalised(*messages: Any) -> list[dict[str, Any]]:
    return list(conversation(messages).messages)


def test_system_and_developer_messages_become_one_in_front() -> None:
    out = normalised(
        {"role": "user", "content": "hi"},
        {"role": "developer", "content": "be brief"},
        {"role": "system", "content": None},
        {"role": "system", "content": [{"type": "text", "text": "be kind"}]},
    )
    assert out == [{"role": "system", "content": "be brief\n\nbe kind"}, {"role": "user", "content": "hi"}]


def test_no_system_message_is_invented() -> None:
    assert normalised({"role": "user", "content": "hi"}) == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_empty_contents_are_empty_strings(content: Any) -> None:
    assert normalised({"role": "assistant", "content": content})[0]["content"] == ""


def test_parts_join_with_line_breaks() -> None:
    parts = [
        {"type": "text", "text": "a"},
        "b",
        {"type": "input_text", "text": "c"},
        {"type": "refusal", "refusal": "d"},
    ]
    assert normalised({"role": "user", "content": parts})[0]["content"] == "a\nb\nc\nd"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"x": 1}', {"x": 1}),
        ({"x": 1}, {"x": 1}),
        ("", {}),
        (None, {}),
        ('{"x": 1', {"arguments": '{"x": 1'}),
        ("[1]", {"arguments": [1]}),
        ('{"x": 18446744073709551617}', {"x": 2**64 + 1}),
    ],
)
def test_tool_arguments_become_a_mapping(arguments: Any, expected: dict[str, Any]) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    out = normalised({"role": "assistant", "content": None, "tool_calls": [call]})
    assert out[0]["tool_calls"] == [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": expected}}]


def test_the_old_form_of_a_call_is_a_call() -> None:
    out = normalised({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}})
    [call] = out[0]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": {"x": 1}}
    assert call["id"]


def test_tool_results_keep_their_call_and_function_results_are_tool_results() -> None:
    out = normalised(
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
        {"role": "function", "name": "f", "content": "43"},
    )
    assert out == [
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "tool", "content": "43", "name": "f"},
    ]


def _round(*ids: str) -> dict[str, Any]:
    calls = [{"id": name, "type": "function", "function": {"name": f"f{name}", "arguments": ""}} for name in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _results(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": name, "content": content} for name, content in pairs]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([_round("a", "b"), *_results(("b", "B"), ("a", "A"))], "ab A B"),
        ([_round("a", "b", "c"), *_results(("c", "C"))], "abc [no result] [no result] C"),
        ([_round("a"), USER, *_results(("a", "A"))], "a A u"),
        ([_round("a"), _round("b"), *_results(("a", "A"), ("b", "B"))], "a A b B"),
        ([_round("a"), *_results(("a", "1")), _round("a"), *_results(("a", "2"))], "a 1 a 2"),
        ([_round("a", "a"), *_results(("a", "1"), ("a", "2"))], "aa 1 2"),
        ([_round("a", "b"), *_results(("x", "X"), ("a", "A"))], "ab A X"),
        ([_round("a"), *_results(("a", "A"), ("x", "X"))], "a A X"),
        ([USER, *_results(("x", "X"))], "u X"),
        ([_round("a"), USER], "a u"),
        ([_round("a", "b")], "ab"),
    ],
)
def test_results_stand_behind_their_calls(given: list[dict[str, Any]], expected: str) -> None:
    words = []
    for message in normalised(*given):
        names = "".join(call["id"] for call in message.get("tool_calls", ()))
        words.append(names or message["content"])
    assert " ".join(words) == expected


@pytest.mark.parametrize("identity", ["x", None])
def test_results_without_ids_of_their_own_go_by_their_names(identity: str | None) -> None:
    ids: dict[str, Any] = {} if identity is None else {"id": identity, "tool_call_id": identity}
    asked = {"role": "assistant", "tool_calls": [{"function": {"name": name}, **ids} for name in "fg"]}
    given = {name: {"role": "tool", "name": name, "content": f"of {name}", **ids} for name in "fgh"}
    assert [m["content"] for m in normalised(asked, given["g"], given["f"])][1:] == ["of f", "of g"]
    assert [m["content"] for m in normalised(asked, given["g"])][1:] == ["[no result]", "of g"]
    assert [m["content"] for m in normalised(asked, given["h"])][1:] == ["of h", "[no result]"]


def test_a_reminder_does_not_part_results_without_ids() -> None:
    asked = {"role": "assistant", "tool_calls": [{"function": {"name": name}} for name in "fg"]}
    first, second = ({"role": "tool", "content": content} for content in "12")
    out = normalised(asked, first, {"role": "system", "content": "S"}, second)
    assert [m["content"][:1] for m in out] == ["", "1", "2"]


def test_a_result_names_its_function() -> None:
    [_, first, second] = normalised(_round("a", "b"), *_results(("b", "B")))
    assert [(m["name"], m["tool_call_id"]) for m in (first, second)] == [("fa", "a"), ("fb", "b")]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_reaches_the_template_under_both_names(name: str) -> None:
    out = normalised({"role": "assistant", "content": "4", name: "2+2"})[0]
    assert out["reasoning"] == out["reasoning_content"] == "2+2"


REAL = [{"type": "reasoning.text", "text": "re", "index": 0}, {"type": "reasoning.text", "text": "al", "index": 0}]


@pytest.mark.parametrize("hides", ["  ", [{"type": "reasoning.encrypted", "data": "z"}], {"text": "a"}, None, 1])
@pytest.mark.parametrize("name", ["reasoning", "reasoning_details"])
def test_the_first_thought_with_a_text_is_taken(hides: Any, name: str) -> None:
    [out] = normalised({"role": "assistant", "content": "4", "reasoning_content": hides, name: REAL})
    assert out["reasoning"] == "real"


def test_summaries_are_paragraphs() -> None:
    summaries = [{"type": "reasoning.summary", "summary": text, "index": i} for i, text in enumerate("ab")]
    [out] = normalised({"role": "assistant", "content": "4", "reasoning_details": [*REAL, *summaries[1:], *summaries]})
    assert out["reasoning"] == "real\n\nb\n\na\n\nb"


def test_foreign_tools_are_left_out() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    out = conversation([{"role": "user", "content": "x"}], [{"type": "web_search"}, tool, {"type": "namespace"}])
    assert list(out.tools) == [tool]


IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}


@pytest.mark.parametrize("role", ["tool", "function"])
def test_what_a_tool_returned_besides_text_is_named_in_its_place(role: str) -> None:
    """An agent sends its whole history with every request: a refusal would be the session's end."""
    parts = [{"type": "text", "text": "Read it."}, IMAGE, {"type": "input_audio"}]
    [message] = normalised({"role": role, "content": parts})
    assert message["content"] == (
        "Read it.\n[image left out: this model reads text only]\n[audio left out: this model reads text only]"
    )


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("hi", "messages[0]"),
        ({"content": "hi"}, "messages[0].role"),
        ({"role": "wizard", "content": "hi"}, "messages[0].role"),
        ({"role": ["user"], "content": "hi"}, "messages[0].role"),
        ({"role": "user", "content": 7}, "messages[0].content"),
        ({"role": "user", "content": ["a", 7]}, "messages[0].content[1]"),
        ({"role": "user", "content": [{"type": "hologram"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "tool", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "tool", "content": [{"type": 1}]}, "messages[0].content[0].type"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function.name"),
    ],
)
def test_bad_messages_name_the_place(message: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        normalised(message)
    assert caught.value.field == field
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("tool", "field"),
    [(1, "tools[0]"), ({"type": "function"}, "tools[0].function.name"), ({"function": {}}, "tools[0].function.name")],
)
def test_bad_tools_name_the_place(tool: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        conversation([{"role": "user", "content": "x"}], [tool])
    assert caught.value.field == field


RENDERERS = (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
OWN = {one.name for render in RENDERERS for one in signature(render).parameters.values() if one.kind != one.VAR_KEYWORD}


@pytest.mark.parametrize("name", [*sorted(OWN), "messages", "no identifier"])
def test_requests_cannot_reach_the_renderers_own_arguments(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        conversation([{"role": "user", "content": "x"}], template_kwargs={name: True})
    assert caught.value.field == "chat_template_kwargs"


def test_no_messages() -> None:
    with pytest.raises(InvalidRequestError, match="must not be empty"):
        conversation([])
