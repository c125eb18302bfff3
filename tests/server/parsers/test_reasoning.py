from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from mlx_specprefill_server.notations.formats import detect

from ..fakes import byte_tokenizer
from .reading import THINK, TOOLS, Read, collected, read
from .test_formats import (
    CALL,
    COMMAND,
    DEEPSEEK,
    DSML,
    GEMMA,
    GLM,
    HARMONY,
    KIMI,
    LLAMA,
    MINIMAX,
    MISTRAL,
    MUSE,
    PYTHON,
    SEED,
    STEP,
    WEATHER,
    XML,
)

OPENED = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
BEGUN = OPENED + "Two and two"


NEXT = "<|eom|><|start|>assistant"
BARE = GEMMA.removeprefix("<|tool_call>").removesuffix("<tool_call|>")
APRIEL = "present your reasoning, then the final response after the marker [BEGIN FINAL RESPONSE]"
NOW = '<tool_call>{"name": "now"}</tool_call>'
SKETCHED = [
    ("hermes", CALL, THINK),
    ("xml", XML, THINK),
    ("glm", GLM, THINK),
    ("minimax", MINIMAX, THINK),
    ("mistral", MISTRAL, ("[THINK]", "[/THINK]")),
    ("gemma", GEMMA, ("<|channel>thought", "<channel|>")),
    ("seed", SEED, ("<seed:think>", "</seed:think>")),
    ("command", COMMAND, ("<|START_THINKING|>", "<|END_THINKING|>")),
    ("deepseek", DEEPSEEK, THINK),
    ("dsml", DSML, THINK),
    ("granite", f"<|tool_call|>[{LLAMA}]", THINK),
    ("kimi", KIMI, THINK),
    (None, STEP, THINK),
]
TO_SELF = f" to=self<|message|>Hm.{NEXT}"
TO_USER = " to=user<|message|>"


def shown(out: Read) -> tuple[Any, ...]:
    return out.reasoning, out.text, out.calls, out.shape


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("", "<think>\nHm.\n</think>\n\nHello.", ("Hm.", "Hello.", [], "rt")),
        ("", "<think>\n\n</think>\n\nHello.", ("", "Hello.", [], "t")),
        ("", "<think>Hm", ("Hm", "", [], "r")),
        ("", "Hello <think>no</think>.", ("", "Hello <think>no</think>.", [], "t")),
        ("", "Hello.", ("", "Hello.", [], "t")),
        (OPENED, "<think>\nHm.\n</think>\n\nHello.", ("Hm.", "Hello.", [], "rt")),
        (OPENED, "Hm. a < b\n\n<b>", ("Hm. a < b\n\n<b>", "", [], "r")),
        (CLOSED, "<think>Hm.</think>Hello.", ("Hm.", "Hello.", [], "rt")),
        (OPENED, f"Hm.\n</think>\n\nI ask.\n{CALL}", ("Hm.", "I ask.", [WEATHER], "rtc")),
        # the prompt has broken off in the middle of reasoning, or of the text behind it
        (BEGUN, " are four.\n</think>\n\nFour.", (" are four.", "Four.", [], "rt")),
        (BEGUN, "\n<think>?</think>Four.", ("\n<think>?", "Four.", [], "rt")),
        (BEGUN + "</think>\n\nIt", " is four.", ("", " is four.", [], "t")),
        # the call is the last thing in reasoning
        (OPENED, f"I ask.\n{CALL}\n{XML}\n", ("I ask.", "", [WEATHER] * 2, "rcc")),
        (OPENED, f"I ask.\n{XML}\n</tool_call>\n</think></think>", ("I ask.", "", [WEATHER], "rc")),
        # sketched: calls are made behind the reasoning
        (OPENED, f"Ask?\n{XML}\n</think>\n{CALL}\n{NOW}", (f"Ask?\n{XML}", "", [WEATHER, ("now", "{}")], "rcc")),
        (OPENED, f"Ask?\n{XML}\n{CALL} No.\n{NOW}", (f"Ask?\n{XML}\n{CALL} No.", "", [("now", "{}")], "rc")),
        (OPENED, f"Ask?\n{XML}\n</think>\n{NOW}\nDone.", (f"Ask?\n{XML}", "Done.", [("now", "{}")], "rct")),
        # thoughts about calls are none
        (OPENED, "A <tool_call> with {json}?</think>No.", ("A <tool_call> with {json}?", "No.", [], "rt")),
    ],
)  # fmt: skip
def test_reasoning_is_divided_from_text_however_it_is_cut(prompt: str, text: str, expected: Any) -> None:
    assert shown(read("hermes", text, prompt=prompt)) == expected
    assert shown(read("hermes", text, range(1, len(text)), prompt=prompt)) == expected
    for cut in range(1, len(text)):
        assert shown(read("hermes", text, [cut], prompt=prompt)) == expected, text[:cut]


@pytest.mark.parametrize(("fmt", "call", "think"), SKETCHED)
def test_a_call_that_is_only_sketched_is_none(fmt: str | None, call: str, think: tuple[str, str]) -> None:
    """In every notation, however it is cut: arguments that have gone out can't be called back."""
    opens, closes = think
    sketch, again = f"{opens}\nI could ask.\n{call} But no.", call.replace("Paris", "Rome")
    rome = ("get_weather", '{"city": "Rome"}')
    for text, calls in (
        (f"{sketch}{closes}\n\nShall I?", []),
        (f"{sketch}{closes}\n\n{again}", [rome]),
        (f"{sketch}\n{again}", [rome]),
        (f"{opens}\nI ask.\n{call}", [WEATHER]),
        (f"{opens}\nI ask.{closes}\n\n{call}", [WEATHER]),
    ):
        for cuts in ([], range(1, len(text)), *([cut] for cut in range(1, len(text)))):
            out = read(fmt, text, cuts, think=think)
            assert (out.calls, out.broken) == (calls, []), text[: cuts[0]] if cuts else text
            assert ("But no." in out.reasoning) is ("But no." in text)
        assert not read(fmt, f"{opens}\nI ask.\n{call}", think=think, complete=False).calls


def test_a_call_in_harmonys_channel_of_reasoning_is_meant_if_only_calls_follow() -> None:
    said, more = "<|channel|>analysis<|message|>But no.<|end|>", "<|start|>assistant"
    sketch = HARMONY.replace("commentary", "analysis").replace("<|call|>", "<|end|>")
    for text, calls in (
        (f"{sketch}{more}{said}{more}<|channel|>final<|message|>Shall I?", []),
        (f"{sketch}{more}{said}{more}{HARMONY}", [WEATHER]),
        (f"{sketch}{more}{HARMONY}", [WEATHER, WEATHER]),
        (sketch, [WEATHER]),
        (sketch.replace("<|end|>", "<|call|>"), [WEATHER]),
    ):
        for cuts in ([], range(1, len(text)), *([cut] for cut in range(1, len(text)))):
            out = read("harmony", text, cuts)
            assert (out.calls, out.broken) == (calls, []), text
            assert ("But no." in out.reasoning) is ("But no." in text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{TO_SELF}{MUSE}{NEXT}{MUSE}", ("Hm.", "", [WEATHER] * 2, "rcc")),
        (f"{TO_USER}I ask.{NEXT}{TO_SELF}{MUSE}", ("Hm.", "I ask.", [WEATHER], "trc")),
    ],
)
def test_muses_messages_are_divided_by_their_recipients(text: str, expected: Any) -> None:
    for cuts in ([], range(1, len(text)), *([cut] for cut in range(1, len(text)))):
        assert shown(read("muse", text, cuts, think=("to=self<|message|>", "<|eom|>"))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # a tag that neither opens nor closes anything
        ("<channel|>\n\nHello.<channel|>", ("", "Hello.", [], "t")),
        ("One <channel|>two.", ("", "One two.", [], "t")),
        ("<|channel>thought\nHm.\n<|channel>thought\nHm?<channel|><channel|>Hello.",
         ("Hm.\n\nHm?", "Hello.", [], "rt")),
        # second thoughts
        (f"<|channel>thought\nHm.<channel|>I ask.{GEMMA}<|channel>thought\nHm?<channel|>Done.",
         ("Hm.Hm?", "I ask.Done.", [WEATHER], "rtcrt")),
        (f"<|channel>thought\nAsk? {GEMMA}<channel|><|channel>thought\nNo.<channel|>Hello.",
         (f"Ask? {GEMMA}No.", "Hello.", [], "rt")),
        # calls without their mark
        (f"<|channel>thought\nHm.<channel|>\n{BARE}<tool_call|>\n{BARE}", ("Hm.", "", [WEATHER] * 2, "rcc")),
        (BARE, ("", "", [WEATHER], "c")),
        (f"Write {BARE}.", ("", f"Write {BARE}.", [], "t")),
    ],
)  # fmt: skip
def test_gemmas_slips_have_one_meaning_however_they_are_cut(text: str, expected: Any) -> None:
    for cuts in ([], range(1, len(text)), *([cut] for cut in range(1, len(text)))):
        assert shown(read("gemma", text, cuts, think=("<|channel>thought", "<channel|>"))) == expected, cuts


def test_a_model_without_reasoning_may_write_about_it() -> None:
    out = read("hermes", "<think>Hm.</think>", think=None)
    assert out.text == "<think>Hm.</think>"


@pytest.mark.parametrize(
    ("template", "prompt", "text", "expected"),
    [
        ("{{ m.content.split('</think>')[-1] }}", "", f"<think>Hm.</think>[{PYTHON}]", ("Hm.", "", [WEATHER], "rc")),
        (APRIEL, "", f"Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\n<tool_calls>[{LLAMA}]</tool_calls>",
         ("Hm.", "", [WEATHER], "rc")),
        (f"{APRIEL} ... [END FINAL RESPONSE]", "",
         "Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\nHello.\n[END FINAL RESPONSE]",
         ("Hm.", "Hello.", [], "rt")),
    ],
)  # fmt: skip
def test_tags_that_only_the_template_knows(template: str, prompt: str, text: str, expected: Any) -> None:
    """LFM2.5 and Apriel, whose vocabularies have no tokens of reasoning."""
    fmt = detect(byte_tokenizer(template, specials=()))
    for cuts in ([], range(1, len(text)), *([cut] for cut in range(1, len(text)))):
        parser = fmt.parser(TOOLS, prompt)
        deltas = [delta for start, end in pairwise([0, *cuts, len(text)]) for delta in parser.push(text[start:end])]
        out = collected(deltas + parser.finish(True))
        assert (out.reasoning, out.text.strip(), *shown(out)[2:]) == expected, text[: cuts[0]] if cuts else text


@pytest.mark.parametrize(("marked", "expected"), [(True, ("Hm.", "Hello.")), (False, ("", "<think>Hm.</think>Hello."))])
def test_lfm2_thinks_though_neither_its_template_nor_its_vocabulary_says_so(
    marked: bool, expected: tuple[str, str]
) -> None:
    specials = ("<|im_end|>", *(["<|tool_call_start|>", "<|tool_call_end|>"] if marked else []))
    parser = detect(byte_tokenizer("{{ messages[-1].content }}", specials=specials)).parser([], "")
    out = collected(parser.push("<think>Hm.</think>Hello.") + parser.finish(True))
    assert (out.reasoning, out.text) == expected


@pytest.mark.parametrize("recipient", ["container.exec", "python", "browser.search"])
def test_what_harmony_writes_to_a_tool_that_nobody_has_is_no_answer(recipient: str) -> None:
    said = "<|channel|>final<|message|>Hello."
    for text in (
        f" to={recipient}<|channel|>commentary<|message|>print(1)<|call|>",
        f"<|channel|>commentary to={recipient} <|constrain|>code<|message|>print(1)<|call|><|start|>assistant{said}",
        f"<|channel|>analysis to={recipient} code<|message|>print(1)<|end|><|start|>assistant{said}",
    ):
        for cuts in ([], range(1, len(text)), *([cut] for cut in range(1, len(text)))):
            for tools in (TOOLS, []):
                out = read("harmony", text, cuts, tools=tools)
                assert (out.reasoning, out.text, out.calls) == ("print(1)", "Hello." if said in text else "", [])


def test_the_tags_come_from_the_vocabulary() -> None:
    fmt = detect(byte_tokenizer())
    assert fmt.think == ("<think>", "</think>")
    (end,) = byte_tokenizer().encode("</think>", add_special_tokens=False)
    assert fmt.reasoning_end(OPENED) == fmt.reasoning_end(BEGUN) == (end,)
    assert fmt.reasoning_end(CLOSED) == fmt.reasoning_end("") == ()


@pytest.mark.parametrize(
    "tags",
    [
        ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"),
        ("<seed:think>", "</seed:think>"), ("<mm:think>", "</mm:think>"), ("to=self<|message|>", "<|eom|>"),
    ],
)  # fmt: skip
def test_the_tags_come_from_the_template_where_the_vocabulary_has_none(tags: tuple[str, str]) -> None:
    assert detect(byte_tokenizer("{}{{{{ thought }}}}{}".format(*tags), specials=())).think == tags


def test_the_end_of_any_message_is_no_tag_of_reasoning() -> None:
    """Llama 4 ends messages as Muse does."""
    assert detect(byte_tokenizer("{{ text }}<|eom|>", specials=())).think is None


@pytest.mark.parametrize("header", ["", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"])
def test_harmony_goes_on_where_the_prompt_ends(header: str) -> None:
    prompt = f"<|start|>user<|message|>Hi<|end|><|start|>assistant{header}"
    text = "<|channel|>analysis<|message|>Hm.<|end|>" if not header else "Hm.<|end|>"
    out = read("harmony", f"{text}<|start|>assistant<|channel|>final<|message|>Hello.", prompt=prompt)
    expected = ("", "Hm.Hello.") if "final" in header else ("Hm.", "Hello.")
    assert (out.reasoning, out.text) == expected
