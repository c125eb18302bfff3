"""The output format that a model writes: its calls and reasoning, by template and vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from mlx_specprefill import ReasoningBudget

from ..parsers.base import Parser, Tools
from ..parsers.call_parts import CALL, CallReader
from ..parsers.native_calls import FAULTS, native_reader
from ..parsers.tagged import Bare, TaggedText
from . import NOTATIONS, THINK_TAGS
from .declaration import Notation
from .harmony import ANSWER_ENDS, ANSWER_HEAD, REASONING_END, REASONING_HEAD, HarmonyText, opened_header
from .hermes import read_tool_call
from .lfm2 import LFM2
from .muse import MUSE
from .muse import START as MUSE_START
from .others import BARE, EXAMPLE, any_readers, other_readers
from .template_text import TemplateText

BudgetMarks = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

ANSWER_TAGS = (  # Hunyuan's, ERNIE's, Apriel's
    ("<answer>", "</answer>"),
    ("<response>", "</response>"),
    ("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),
)


@dataclass(frozen=True, slots=True)
class Format:
    """The output format of one model.

    Attributes:
        tools: the format of calls; None: the template has none. Text that looks like a call is read as one if the
            request has tools.
        think: the tags around reasoning; None: the model writes none.
        think_end: the tokens of the second tag.
        budget_marks: the tokens that open reasoning, those that close it, and those that close it for good.
        ends: further tokens that end an answer. Some checkpoints don't list all end tokens.
        tokenizer: an mlx_lm TokenizerWrapper, for the formats that mlx-lm parses.
        around: the tags that the template puts around answers.
    """

    tools: str | None
    think: tuple[str, str] | None
    think_end: tuple[int, ...] = ()
    ends: frozenset[int] = frozenset()
    budget_marks: BudgetMarks | None = None
    tokenizer: Any = None
    around: tuple[str, ...] = ()

    @property
    def notation(self) -> str | None:
        """The format of calls, or else what begins them by the template; None: neither is known."""
        template = str(getattr(self.tokenizer, "chat_template", "") or "")
        return self.tools or next(
            (mark for mark in (*other_readers(), *BARE.anywhere, EXAMPLE) if mark in template), None
        )

    def is_reasoning_open(self, prompt: str) -> bool:
        """Return whether the prompt ends inside reasoning: after its tag, or in the middle of it."""
        return self.think is not None and prompt.rfind(self.think[0]) > prompt.rfind(self.think[1])

    def reasoning_end(self, prompt: str) -> tuple[int, ...]:
        """The tokens after which the answer proper begins; none if it begins at once."""
        return self.think_end if self.is_reasoning_open(prompt) else ()

    def may_think(self, prompt: str) -> tuple[str, str] | None:
        """Return the tags of reasoning that the model may open itself, None where the prompt has either tag."""
        return None if self.think is None or any(tag in prompt for tag in self.think) else self.think

    def budget(self, tokens: int, prompt: str) -> ReasoningBudget | None:
        """Return a limiter that ends reasoning after `tokens` tokens, None if the model has no marks for it.

        Args:
            prompt: as for `parser`.
        """
        if self.budget_marks is None:
            return None
        opened = self.is_reasoning_open(prompt) or (self.tools == "harmony" and REASONING_HEAD in opened_header(prompt))
        return ReasoningBudget(tokens, *self.budget_marks, opened=opened)

    def parser(self, tools: Sequence[Mapping[str, Any]], prompt: str, *, as_json: bool = False) -> Parser:
        """Return a parser of one answer.

        Args:
            tools: the request's function tools; without any, no text is taken for a call.
            prompt: the beginning of the answer's turn in the prompt. It may open and begin the reasoning.
            as_json: a grammar has calls as JSON in `<tool_call>`, if the notation has none.
        """
        known = Tools.of(tools)
        if self.tools == "harmony":
            return Parser(HarmonyText(known, opened_header(prompt)))
        if self.tools == "template" and not as_json:
            return Parser(TemplateText(known, self.tokenizer.get_response_parser(prefix=prompt, tools=list(tools))))
        openers, bare = self._readers(list(tools), known) if known else ({}, None)
        if known and as_json:
            openers = {**openers, CALL: read_tool_call}
        begun = not prompt.rstrip().endswith(self.think[0]) if self.think else False
        notation = NOTATIONS.get(self.tools or "", Notation())
        again = any(one.again and one.think == self.think for one in NOTATIONS.values())
        around = (*(notation.around or self.around), *(notation.recipients(known) if notation.recipients else ()))
        thinking = self.is_reasoning_open(prompt)
        return Parser(TaggedText(known, self.think, thinking, openers, bare, begun=begun, again=again, around=around))

    def _readers(self, tools: list[Any], known: Tools) -> tuple[Mapping[str, CallReader], Bare | None]:
        if self.tools == "native":
            wrapper = self.tokenizer
            read = native_reader(wrapper.tool_call_start, wrapper.tool_call_end or "", wrapper.tool_parser, tools)
            return {wrapper.tool_call_start: read, CALL: read_tool_call}, None
        notation = NOTATIONS.get(self.tools or "", Notation())
        if not notation.readers:
            return any_readers(known)
        return {**notation.readers, **(notation.named(known) if notation.named else {})}, notation.bare


def plain_text() -> Parser:
    """Return a parser of text without reasoning or calls: everything is visible."""
    return Parser(TaggedText(Tools(), None, False, {}))


def detect(tokenizer: Any, tools: str | None = None, reasoning: str | None = None) -> Format:
    """Return the format of a model.

    Args:
        tokenizer: an mlx_lm TokenizerWrapper.
        tools, reasoning: formats given by the user, in place of the detected ones.
    """
    template = str(getattr(tokenizer, "chat_template", "") or "")
    think = reasoning_tags(tokenizer) if reasoning in (None, "native") else THINK_TAGS[reasoning]
    think_end = tuple(tokenizer.encode(think[1], add_special_tokens=False)) if think else ()
    calls = _native(tokenizer) if tools == "native" else tools or _tools(tokenizer, template)
    known = tokenizer.get_added_vocab()
    known_ends = frozenset(known[end] for end in ANSWER_ENDS if calls == "harmony" and end in known)
    pairs = (pair for pair in ANSWER_TAGS if all(tag in template for tag in pair))
    around = (*chain.from_iterable(pairs), *getattr(tokenizer, "structural_markers", ()))  # mlx-lm's of Kimi K3
    return Format(calls, think, think_end, known_ends, _budget_marks(tokenizer, calls, think), tokenizer, around)


def _budget_marks(tokenizer: Any, calls: str | None, think: tuple[str, str] | None) -> BudgetMarks | None:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    if calls == "harmony":  # its models then continue in another channel
        return ids(REASONING_HEAD), ids(REASONING_END), ids(REASONING_END + ANSWER_HEAD)
    if calls == "muse":  # the mark stands behind a space, and the next message follows
        head, end = THINK_TAGS[calls]
        return ids(f" {head}"), ids(end), ids(f"{end}{MUSE_START}")
    return None if think is None else (ids(think[0]), ids(think[1]), ids(think[1]))


def _tools(tokenizer: Any, template: str) -> str | None:
    """Return the format by the marks in the template, or in the vocabulary if Python code stands for a template."""
    text = template or (" ".join(tokenizer.get_added_vocab()) if tokenizer.has_chat_template else "")
    found = (name for name, one in NOTATIONS.items() if any(all(m in text for m in marks) for marks in one.marks))
    return next(found, None) or _by_response_template(tokenizer) or _native(tokenizer)


def _by_response_template(tokenizer: Any) -> str | None:
    if getattr(tokenizer, "response_template", None):
        with suppress(*FAULTS):  # of a template that transformers does not know
            tokenizer.get_response_parser(prefix="")
            return "template"
    return None


def _native(tokenizer: Any) -> str | None:
    """Return the format of the parser that mlx-lm chose, None if it has none."""
    if tokenizer.has_tool_calling and tokenizer.tool_parser is not None:
        own = {mark: name for name, one in NOTATIONS.items() for mark in one.readers} | {CALL: "hermes"}
        return own.get(tokenizer.tool_call_start, "native")
    return None


def reasoning_tags(tokenizer: Any) -> tuple[str, str] | None:
    """Return the tags around a model's reasoning by its vocabulary and chat template, None if it writes none.

    A template that only takes reasoning away names its end alone. LFM2's models think though neither says so.
    """
    template = str(getattr(tokenizer, "chat_template", "") or "")
    if tokenizer.has_thinking:
        return str(tokenizer.think_start), str(tokenizer.think_end)
    known = tokenizer.get_added_vocab()
    said = (
        tags
        for tags in THINK_TAGS.values()
        if (tags[1] in template and (tags != MUSE.think or tags[0] in template)) or all(tag in known for tag in tags)
    )  # Muse's end is that of any message, as in Llama 4's templates
    return next(said, THINK_TAGS["think"] if LFM2.history_mark in known else None)
