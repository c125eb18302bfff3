from __future__ import annotations

from typing import Any

import pytest

from mlx_specprefill_server.parsers.formats import detect

from ..fakes import byte_tokenizer
from .reading import Read, read
from .test_formats import CALL, MISTRAL, PARIS, WEATHER, XML

OPENED = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
BEGUN = OPENED + "Two and two"


def shown(out: Read) -> tuple[Any, ...]:
    return out.reasoning, out.text, out.calls, out.shape


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("", "<think>\nHm.\n</think>\n\nHello.", ("Hm.", "Hello.", [], "rt")),
        ("", "\n<think>Hm.</think>Hello.\n", ("Hm.", "Hello.\n", [], "rt")),
        ("", "<think>\n\n</think>\n\nHello.", ("", "Hello.", [], "t")),
        ("", "<think>Hm", ("Hm", "", [], "r")),
        ("", "<think></think>", ("", "", [], "")),
        ("", "Hello <think>no</think>.", ("", "Hello <think>no</think>.", [], "t")),
        ("", "Hello.", ("", "Hello.", [], "t")),
        ("", " \n", ("", " \n", [], "t")),
        (OPENED, "Hm.\n</think>\n\nHello.", ("Hm.", "Hello.", [], "rt")),
        (OPENED, "<think>\nHm.\n</think>\n\nHello.", ("Hm.", "Hello.", [], "rt")),
        (OPENED, "Hm. a < b\n\n<b>", ("Hm. a < b\n\n<b>", "", [], "r")),
        (CLOSED, "Hello.", ("", "Hello.", [], "t")),
        (CLOSED, "<think>Hm.</think>Hello.", ("Hm.", "Hello.", [], "rt")),
        (OPENED, f"Hm.\n</think>\n\nI ask.\n{CALL}", ("Hm.", "I ask.", [WEATHER], "rtc")),
        (OPENED, f"Hm.\n</think>\n\n{CALL}\n", ("Hm.", "", [WEATHER], "rc")),
        # the prompt has broken off in the middle of reasoning, or of the text behind it
        (BEGUN, " are four.\n</think>\n\nFour.", (" are four.", "Four.", [], "rt")),
        (BEGUN, "\n<think>?</think>Four.", ("\n<think>?", "Four.", [], "rt")),
        (BEGUN, "</think>Four.", ("", "Four.", [], "t")),
        (BEGUN, f" are\n{CALL}", (" are", "", [WEATHER], "rc")),
        (BEGUN + "</think>\n\nIt", " is four.", ("", " is four.", [], "t")),
        # the call comes inside reasoning that is never closed, or closed too late
        (OPENED, f"I ask.\n{CALL}", ("I ask.", "", [WEATHER], "rc")),
        (OPENED, f"I ask.\n{XML}", ("I ask.", "", [WEATHER], "rc")),
        (OPENED, f"I ask.\n{XML}\n</think>\n\nDone.", ("I ask.", "Done.", [WEATHER], "rct")),
        # thoughts about calls are none
        (OPENED, "A <tool_call> with {json}?</think>No.", ("A <tool_call> with {json}?", "No.", [], "rt")),
        (OPENED, 'A <tool_call>{"name": "x"}</tool_call>?', ('A <tool_call>{"name": "x"}</tool_call>?', "", [], "r")),
        (OPENED, f'Say {{"name": "get_weather", "arguments": {PARIS}}}?</think>No.',
         (f'Say {{"name": "get_weather", "arguments": {PARIS}}}?', "No.", [], "rt")),
    ],
)  # fmt: skip
def test_reasoning_is_divided_from_text_however_it_is_cut(prompt: str, text: str, expected: Any) -> None:
    assert shown(read("hermes", text, prompt=prompt)) == expected
    assert shown(read("hermes", text, range(1, len(text)), prompt=prompt)) == expected
    for cut in range(1, len(text)):
        assert shown(read("hermes", text, [cut], prompt=prompt)) == expected, text[:cut]


def test_reasoning_between_marks_of_other_families() -> None:
    out = read("mistral", f"[THINK]Hm.[/THINK]I ask.{MISTRAL}", think=("[THINK]", "[/THINK]"))
    assert shown(out) == ("Hm.", "I ask.", [WEATHER], "rtc")
    out = read("gemma", "<|channel>thought\nHm.<channel|>Hello.", think=("<|channel>thought", "<channel|>"))
    assert shown(out) == ("Hm.", "Hello.", [], "rt")


def test_a_model_without_reasoning_may_write_about_it() -> None:
    out = read("hermes", "<think>Hm.</think>", think=None)
    assert out.text == "<think>Hm.</think>"


def test_the_tags_come_from_the_vocabulary() -> None:
    fmt = detect(byte_tokenizer())
    assert fmt.think == ("<think>", "</think>")
    (end,) = byte_tokenizer().encode("</think>", add_special_tokens=False)
    assert fmt.reasoning_end(OPENED) == fmt.reasoning_end(BEGUN) == (end,)
    assert fmt.reasoning_end(CLOSED) == fmt.reasoning_end("") == ()


@pytest.mark.parametrize("header", ["", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"])
def test_harmony_goes_on_where_the_prompt_ends(header: str) -> None:
    prompt = f"<|start|>user<|message|>Hi<|end|><|start|>assistant{header}"
    text = "<|channel|>analysis<|message|>Hm.<|end|>" if not header else "Hm.<|end|>"
    out = read("harmony", f"{text}<|start|>assistant<|channel|>final<|message|>Hello.", prompt=prompt)
    expected = ("", "Hm.Hello.") if "final" in header else ("Hm.", "Hello.")
    assert (out.reasoning, out.text) == expected
