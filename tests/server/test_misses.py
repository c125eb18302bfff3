"""Twenty-odd ways in which agents break their own prefix: each is told by its kind, at its place, in its words."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

from mlx_specprefill import CacheLabel, GenerationRequest, PrefixMiss, TokenIds
from mlx_specprefill.engine.prefixes.misses import explain_miss
from mlx_specprefill_server.prompt.builder import Prompt, PromptBuilder
from mlx_specprefill_server.prompt.conversation import conversation

from . import templates
from .fakes import CHATML, SPECIALS

FOLDER = Path(__file__).parents[2] / "models" / "demo" / "target"
DATED = "{{ '<|im_start|>system\nToday Date: ' + date + '\nEffort: ' + effort + '<|im_end|>\n' }}" + CHATML
REASONED = templates.HARMONY.replace(
    "{%- elif message.role == 'assistant' and message.tool_calls %}",
    "{%- elif message.role == 'assistant' and message.tool_calls %}{% if message.thinking %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}",
)
WORDS = "the server reads a file and writes what it has found into another one before the tests run again".split()


def wrapped(template: str, eos: str = "<|im_end|>") -> TokenizerWrapper:
    inner = PreTrainedTokenizerFast(tokenizer_file=str(FOLDER / "tokenizer.json"), eos_token=eos)
    inner.add_special_tokens({"additional_special_tokens": [token for token in SPECIALS if token != eos]})
    inner.chat_template = template
    return TokenizerWrapper(inner)


TOKENIZERS = {
    "qwen": wrapped(templates.QWEN_3),
    "dated": wrapped(DATED),
    "harmony": wrapped(templates.HARMONY, "<|return|>"),
    "reasoned": wrapped(REASONED, "<|return|>"),
}
BUILDERS = {name: PromptBuilder(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def prose(words: int, seed: int) -> str:
    drawn = random.Random(seed)
    return " ".join(f"{drawn.choice(WORDS)}{drawn.choice(['', '', ',', '.'])}" for _ in range(words))


def tool(name: str, seed: int) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"path": {"type": "string", "description": prose(20, seed + 50)}}}
    function = {"name": name, "description": prose(60, seed), "parameters": parameters}
    return {"type": "function", "function": function}


def call(name: str, reasoning: str = "") -> dict[str, Any]:
    calls = [{"id": "call_1", "type": "function", "function": {"name": name, "arguments": '{"path": "a.py"}'}}]
    thought = {"reasoning_content": reasoning, "thinking": reasoning} if reasoning else {}
    return {"role": "assistant", "content": "", "tool_calls": calls, **thought}


SYSTEM = f"You are an agent. {prose(60, 1)}\n\nNow: MARK\n\n- [ ] write the tests\n\n{prose(900, 2)}"
TOOLS = [tool(name, seed) for seed, name in enumerate(["bash", "edit", "glob", "grep", "read", "write"])]
MESSAGES = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": f"Please mend the parser. {prose(120, 3)}"},
    call("read", "First I read the parser, since the failure is there."),
    {"role": "tool", "content": f"File read as chunk 0x1a2b.\n{prose(700, 4)}", "tool_call_id": "call_1"},
    call("grep", "It is called from two places."),
    {"role": "tool", "content": prose(800, 5), "tool_call_id": "call_1"},
]


@dataclass
class Chat:
    """A request's conversation, changed in place by a break."""

    messages: list[dict[str, Any]] = field(default_factory=lambda: copy.deepcopy(MESSAGES))
    tools: list[dict[str, Any]] = field(default_factory=lambda: copy.deepcopy(TOOLS))
    kwargs: dict[str, Any] = field(default_factory=lambda: {"date": "24 Nov 2026", "effort": "low"})

    def replace(self, index: int, old: str, new: str) -> None:
        content = self.messages[index]["content"]
        assert old in content
        self.messages[index]["content"] = content.replace(old, new)

    def prompt(self, style: str) -> Prompt:
        # Keys that normalised messages don't have reach the template as in a request of the model's own kind.
        made = conversation(self.messages, *(((), self.kwargs) if style == "dated" else (self.tools,)))
        for message, sent in zip(made.messages, self.messages, strict=True):
            message.update({"thinking": sent["thinking"]} if "thinking" in sent else {})
        return asyncio.run(BUILDERS[style].chat(made))


Change = Callable[[Chat], None]


def marked(text: str) -> Change:
    return lambda chat: chat.replace(0, "MARK", text)


def no_reasoning(chat: Chat) -> None:
    for message in chat.messages:
        for key in ("reasoning_content", "thinking"):
            message.pop(key, None)


def nothing(_: Chat) -> None:
    pass


@dataclass(frozen=True)
class Break:
    name: str
    kind: str
    role: str
    now: str  # with what the new version begins at the place
    new: Change
    old: Change = nothing
    was: str = ""
    style: str = "qwen"


def clock(name: str, kind: str, was: str, now: str) -> Break:
    return Break(name, kind, "system", now, marked(f"At {now} it goes"), marked(f"At {was} it goes"), was)


BREAKS = [
    clock("a clock", "time", "12:41", "12:42"),
    clock("a clock with seconds", "time", "09:59:58", "10:00:01"),
    clock("a date", "time", "2026-11-24", "2026-11-25"),
    clock("a date in words", "time", "Tue Nov 24", "Wed Nov 25"),
    clock("seconds since the epoch", "time", "1795541234", "1795542345"),
    clock("a time stamp", "time", "2026-11-24T12:41:03.123Z", "2026-11-24T12:41:03.987Z"),
    clock("a counter", "counter", "17", "18"),
    clock("a session's id", "counter", "c0191075-a22d-4a5a", "9be5badc-d572-4533"),
    clock("a temporary folder", "counter", "/tmp/tmp3ab/home", "/tmp/tmpc9x/home"),
    Break(
        "an attribution header", "counter", "system", "cc_version=2.1.330.ce0",
        marked("cc_version=2.1.330.ce0; cch=1f"), marked("cc_version=2.1.330.d17; cch=a2"), "cc_version=2.1.330.d17",
    ),
    Break("the id of a result", "counter", "tool", "0x9f2c", lambda c: c.replace(3, "0x1a2b", "0x9f2c"), was="0x1a2b"),
    Break("the template's date", "time", "system", "25", lambda c: c.kwargs.update(date="25 Nov 2026"),
          was="24", style="dated"),
    Break("two tools swapped", "tool_order", "system", "glob", lambda c: c.tools.insert(1, c.tools.pop(2)), was="edit"),
    Break("tools the other way round", "tool_order", "system", "write", lambda c: c.tools.reverse(), was="bash"),
    Break("reasoning dropped", "reasoning", "assistant", "", no_reasoning, was="<think>"),
    Break("reasoning dropped by the template", "reasoning", "assistant", "",
          lambda c: c.messages.append({"role": "user", "content": "And now?"}), was="<think>"),
    Break("reasoning dropped from a channel", "reasoning", "assistant", "", no_reasoning, was="", style="reasoned"),
    Break("a ticked task", "edited", "system", "[x", lambda c: c.replace(0, "[ ]", "[x]"), was="["),
    Break("another word of the user", "edited", "user", "rewrite", lambda c: c.replace(1, "mend", "rewrite"),
          was="mend"),
    Break("an old result cleared", "edited", "tool", "[cleared]",
          lambda c: c.messages[3].update(content="[cleared]"), was="File"),
    Break("a tool more", "edited", "system", "fetch", lambda c: c.tools.insert(1, tool("fetch", 30)), was="edit"),
    Break("a tool less", "edited", "system", "edit", lambda c: c.tools.pop(0) and None, was="bash"),
    Break("the first messages dropped", "edited", "assistant", "It is", lambda c: c.messages.__delitem__(slice(2, 4)),
          was="First I"),
    Break("another effort", "template", "system", "high", lambda c: c.kwargs.update(effort="high"), was="low",
          style="dated"),
]  # fmt: skip


def first_difference(one: TokenIds, other: TokenIds) -> int:
    return next(i for i, (a, b) in enumerate(zip(one.tolist(), other.tolist(), strict=False)) if a != b)


def found(case: Break) -> tuple[PrefixMiss, Prompt]:
    old, new = Chat(), Chat()
    case.old(old)
    case.new(new)
    was, now = old.prompt(case.style), new.prompt(case.style)
    place = first_difference(was.tokens, now.tokens)
    request = GenerationRequest(now.tokens, 1, spans=now.spans, label=CacheLabel(salt="ours"))
    miss = explain_miss(request, (place, [was.tokens]), TOKENIZERS[case.style].decode)
    assert miss is not None
    return miss, now


@pytest.mark.parametrize("case", BREAKS, ids=lambda case: case.name)
def test_a_break_is_told_by_its_kind_and_place(case: Break) -> None:
    miss, now = found(case)
    assert (miss.kind, miss.role) == (case.kind, case.role)
    assert miss.message is not None
    span = now.spans[miss.message]
    assert span.start <= miss.token < span.end
    assert miss.was.startswith(case.was)
    assert miss.now.startswith(case.now)
