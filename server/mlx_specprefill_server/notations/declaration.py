"""The declaration of a notation of calls. Each family's file has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..parsers.base import NAME as NAME
from ..parsers.base import Tools
from ..parsers.call_parts import CALL, END_CALL, CallReader
from ..parsers.tag_calls import Tags
from ..parsers.tagged import Bare


class Written(NamedTuple):
    """The text of a call with holes: {name}, {arguments} or {input}, {number}, {id}, and {line} and {space}, which
    may be empty.

    Attributes:
        between: text between two calls; None: an answer has one.
        before, after: texts before the first call and behind the last.
        needs: the mark that its vocabulary has.
        excluded: the marks that no {input} may hold.
    """

    call: str
    between: str | None = ""
    before: str = ""
    after: str = ""
    needs: str = ""
    excluded: tuple[str, ...] = ()


# JSON is what a grammar makes a model write whose notation has none. Every parser reads it in such answers.
OBJECT = '{"name": "{name}", "arguments": {arguments}}'
JSON_CALLS = (Written(f"{CALL}{{line}}{OBJECT}{{line}}{END_CALL}", "\n"),)


def one_text(tags: Tags) -> Written:
    """Return how a call of a tool with one text is written between tags."""
    line = "\n" if tags.lines else ""
    head = f"{tags.call}\n{tags.function}{{name}}{tags.close}\n{tags.parameter}input{tags.close}{line}"
    tail = f"{line}{tags.end_parameter}\n{tags.end_function}\n{tags.end_call}"
    return Written(f"{head}{{input}}{tail}", excluded=tuple(tags.ends()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """The way in which one family of models writes calls and reasoning.

    Attributes:
        marks: the sets of marks by which a template, or a vocabulary, tells of it; each set is enough.
        readers: the readers of calls by their opening marks; none: those of any model, see `others`.
        named: returns further readers for the request's tools.
        bare: calls without a tag.
        think: the tags around reasoning.
        again: reasoning may be opened again, and no text holds its tags.
        around: the marks around answers that say nothing.
        recipients: returns such marks for the request's tools.
        written: how a grammar has calls written: the first whose mark is in the vocabulary.
        text: how it has a call of a tool with one text written that the model begins itself, if not as JSON.
        begun: the marks before the name of such a call, and behind the call; none: it can't be told from text.
        marked: the second mark is behind the name, where others may stand, too.
        history: writes calls into a conversation for a template that does not; `history_mark` in the vocabulary or
            the template tells of a model that was trained on it.
    """

    marks: tuple[tuple[str, ...], ...] = ()
    readers: Mapping[str, CallReader] = field(default_factory=dict)
    named: Callable[[Tools], Mapping[str, CallReader]] | None = None
    bare: Bare | None = None
    think: tuple[str, str] | None = None
    again: bool = False
    around: tuple[str, ...] = ()
    recipients: Callable[[Tools], Sequence[str]] | None = None
    written: Sequence[Written] = JSON_CALLS
    text: Written | None = None
    begun: tuple[str, str] | None = None
    marked: bool = False
    history: Callable[[Sequence[Mapping[str, Any]]], str] | None = None
    history_mark: str = ""
