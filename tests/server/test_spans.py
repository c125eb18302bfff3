from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specprefill import PromptSpan
from mlx_specprefill_server.prompt.builder import Prompt, PromptBuilder
from mlx_specprefill_server.prompt.conversation import conversation
from mlx_specprefill_server.prompt.spans import CharSpan, to_tokens

from . import templates
from .fakes import CHATML, byte_tokenizer

TOOL = {"type": "function", "function": {"name": "read_file", "description": "Reads </s> a file", "parameters": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.txt"}'}}
STYLES = {
    "chatml": byte_tokenizer(CHATML),
    "llama3": byte_tokenizer(templates.LLAMA_3, eos="<|eot_id|>"),
    "mistral": byte_tokenizer(templates.MISTRAL, eos="</s>"),
    "gemma": byte_tokenizer(templates.GEMMA, eos="<end_of_turn>"),
    "qwen3": byte_tokenizer(templates.QWEN_3),
    "harmony": byte_tokenizer(templates.HARMONY, eos="<|return|>"),
    "plain": byte_tokenizer(templates.PLAIN),
    "nosy": byte_tokenizer(templates.NOSY),
}
BUILDERS = {name: PromptBuilder(tokenizer) for name, tokenizer in STYLES.items()}


def build(style: str, messages: list[dict[str, Any]], tools: Any = (), **kwargs: Any) -> Prompt:
    return asyncio.run(BUILDERS[style].chat(conversation(messages, tools, kwargs)))


def cut(style: str, prompt: Prompt, start: int, end: int) -> str:
    return STYLES[style].decode(list(prompt.tokens[start:end]))


def parts(style: str, prompt: Prompt) -> list[tuple[str, str, str, str]]:
    return [
        (
            span.kind,
            cut(style, prompt, span.start, span.content_start),
            cut(style, prompt, span.content_start, span.content_end),
            cut(style, prompt, span.content_end, span.end),
        )
        for span in prompt.spans
    ]


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


DIALOGUE = [turn("system", "Be brief."), turn("user", "user"), turn("assistant", "Yes."), turn("user", " user\n")]


def test_chatml() -> None:
    prompt = build("chatml", DIALOGUE)
    assert parts("chatml", prompt) == [
        ("system", "<|im_start|>system\n", "Be brief.", "<|im_end|>\n"),
        ("user", "<|im_start|>user\n", "user", "<|im_end|>\n"),
        ("assistant", "<|im_start|>assistant\n", "Yes.", "<|im_end|>\n"),
        ("user", "<|im_start|>user\n ", "user", "\n<|im_end|>\n"),
    ]
    assert cut("chatml", prompt, prompt.spans[-1].end, len(prompt.tokens)) == "<|im_start|>assistant\n"


def test_a_token_across_the_end_of_a_content_belongs_to_it() -> None:
    """As a question mark does that a tokenizer joins with the line break behind it."""
    span = CharSpan("user", 0, 6, 10, 17)  # "<user>", "Why?", "\n<end>"
    assert to_tokens([span], [(0, 6), (6, 9), (9, 11), (11, 17)]) == (PromptSpan("user", 0, 1, 3, 4),)
    assert to_tokens([span], [(0, 6), (6, 10), (10, 11), (11, 17)]) == (PromptSpan("user", 0, 1, 2, 4),)
    assert to_tokens([span], [(0, 6), (6, 9), (9, 19)]) == (PromptSpan("user", 0, 1, 2, 2),)  # a border of messages


def test_qwen_3_tool_loop() -> None:
    messages = [
        turn("user", "Read it."),
        turn("assistant", "", tool_calls=[CALL]),
        turn("tool", "first"),
        turn("tool", "second"),
        turn("assistant", "<think>\nhm\n</think>\n\nDone.", tool_calls=[CALL]),
        turn("user", "Thanks."),
    ]
    prompt = build("qwen3", messages)
    call = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a.txt"}}\n</tool_call>'
    assert parts("qwen3", prompt) == [
        ("user", "<|im_start|>user\n", "Read it.", "<|im_end|>\n"),
        ("assistant", "<|im_start|>assistant\n", call, "<|im_end|>\n"),
        ("tool", "<|im_start|>user\n<tool_response>\n", "first", ""),
        ("tool", "\n</tool_response>\n<tool_response>\n", "second", "\n</tool_response><|im_end|>\n"),
        ("assistant", "<|im_start|>assistant\n", f"Done.\n{call}", "<|im_end|>\n"),
        ("user", "<|im_start|>user\n", "Thanks.", "<|im_end|>\n"),
    ]


def test_harmony() -> None:
    messages = [
        turn("system", "Be brief."),
        turn("user", "Read it."),
        turn("assistant", "", tool_calls=[CALL]),
        turn("tool", 'say "hi"'),
    ]
    prompt = build("harmony", messages, [TOOL])
    own, system, user, call, tool = parts("harmony", prompt)
    assert own[0] == "tools"
    assert system[1:3] == ("<|start|>developer<|message|># Instructions\n\n", "Be brief.")
    assert system[3].endswith("// read_file\n<|end|>")
    assert user == ("user", "<|start|>user<|message|>", "Read it.", "<|end|>")
    assert call[0] == "assistant"
    assert call[1] == "<|start|>assistant"
    assert call[2].endswith('{"path": "a.txt"}')
    assert tool[2:] == ('say \\"hi\\"', '"<|end|>')


def test_without_markers_the_template_text_is_the_next_header() -> None:
    assert parts("plain", build("plain", DIALOGUE[1:3])) == [
        ("user", "USER: ", "user", ""),
        ("assistant", "\nASSISTANT: ", "Yes.", ""),
    ]


def test_a_template_that_looks_into_contents_gets_only_what_is_unmistakable() -> None:
    long = "A question that occurs once in this prompt."
    prompt = build("nosy", [turn("user", "hi"), turn("assistant", "hi"), turn("user", long)])
    assert [(kind, content) for kind, _, content, _ in parts("nosy", prompt)][-1] == ("user", long)
    assert len(prompt.spans) == 2  # what precedes it is one span of unknown content
    prompt = build("nosy", [turn("user", long), turn("assistant", long)])
    assert prompt.spans == ()


@pytest.mark.extended
def test_a_text_full_of_our_marks_takes_no_longer_than_another() -> None:
    """Looking for a mark that is not in the text must not go through the text once for each that is."""
    marks = " ".join(f"Qk{i}zX" for i in range(60_000))
    begun = time.thread_time()
    messages = [turn("user", "One."), turn("assistant", marks), turn("user", "Two.")]
    prompt = build("chatml", messages)
    assert time.thread_time() - begun < 12  # once per mark took 20 s
    assert [content for _, _, content, _ in parts("chatml", prompt)] == ["One.", marks, "Two."]


CONTENT = st.text(alphabet="ab é🎉\n<>|{}\"\\'", max_size=12) | st.sampled_from(
    ["user", "assistant", "<|im_end|>", "</think>", "<think>x</think>y", "Qk0zX0ox"]
)
TURNS = st.lists(st.tuples(CONTENT, CONTENT), max_size=3)


@pytest.mark.parametrize("style", list(STYLES))
@settings(max_examples=40)
@given(system=st.none() | CONTENT, turns=TURNS, last=CONTENT, with_tools=st.booleans())
def test_spans_are_ordered_and_hold_the_messages(
    style: str, system: str | None, turns: list[tuple[str, str]], last: str, with_tools: bool
) -> None:
    messages = [turn("system", system)] if system is not None else []
    for asked, said in turns:
        messages += [turn("user", asked), turn("assistant", said)]
    messages.append(turn("user", last))
    prompt = build(style, messages, [TOOL] if with_tools else [])
    check_order(prompt)
    text = STYLES[style].apply_chat_template(
        messages, tools=[TOOL] if with_tools else None, add_generation_prompt=True, tokenize=False
    )
    assert STYLES[style].decode(list(prompt.tokens)) == text
    if style != "nosy":
        user = [part[2] for part in parts(style, prompt) if part[0] == "user"]
        asked = [m["content"].strip() for m in messages if m["role"] == "user"]
        assert [content for content in user if content.strip()] == [content for content in asked if content]


def check_order(prompt: Prompt) -> None:
    end = 0
    for span in prompt.spans:
        assert isinstance(span, PromptSpan)
        assert end <= span.start < span.end
        end = span.end
    assert end <= len(prompt.tokens)
