"""Calls as tags with unquoted values, one for each argument."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..schemas import TYPES
from .base import Cursor, MalformedError, Reading, Tools, skip, spaces, starts_with
from .call_parts import CALL, END_CALL, CallReader, call, declared, emit, expect, until
from .json_text import JsonReader
from .values import Ends, Members, Value

# What the tags of a parameter say of its value.
KINDS = (frozenset({"string"}), TYPES - {"string"})
EMPTY = ("/>", " />")  # the end of a tag without a tag that ends it


class Tags(NamedTuple):
    """The tags of a notation with one tag per argument.

    Attributes:
        close: what ends the name in the tag of a function, and in that of a parameter without `kinds`.
        lines: values stand on lines of their own.
        kinds: what follows the quoted name of a parameter before a text, and before JSON; none: the schema tells.
        beside: marks before and behind a function that say nothing.
    """

    call: str
    end_call: str
    function: str
    end_function: str
    parameter: str
    close: str
    lines: bool
    end_parameter: str = "</parameter>"
    kinds: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def end_name(self) -> str:
        """The end of the name in the tag of a parameter."""
        return '"' if self.kinds else self.close

    def ends(self, names: Iterable[str] = ()) -> Ends:
        """Return the ends of a value. Models sometimes omit its end tag, also before parameters of these names."""
        return {
            self.end_parameter: (self.parameter, self.end_function, self.end_call, self.function, self.call),
            self.end_function: (self.end_call, self.function, self.call),
            self.end_call: (self.call,),
            f"\n{self.parameter}": tuple(f"{name}{self.end_name}" for name in names),
        }


XML = Tags(CALL, END_CALL, "<function=", "</function>", "<parameter=", ">", lines=True)


def tag_reader(tags: Tags) -> CallReader:
    """Return a reader of all calls between two tags."""

    def read(cursor: Cursor, tools: Tools) -> Reading[None]:
        yield from expect(cursor, tags.call)
        yield from spaces(cursor)
        yield from read_functions(cursor, tools, tags)

    return read


def read_functions(cursor: Cursor, tools: Tools, tags: Tags = XML) -> Reading[None]:
    """Read one or more functions and the end tag around them. Models sometimes omit either tag."""
    yield from _beside(cursor, tags)
    if not (yield from starts_with(cursor, (tags.function,))):
        raise MalformedError("a function is expected")
    while (yield from skip(cursor, tags.function)):
        name = tools.name((yield from _name(cursor, tags.close)))
        is_empty = yield from skip(cursor, *(f"{tags.close[:-1]}{end}" for end in EMPTY))
        yield from call(name, emit("{}") if is_empty else _arguments(cursor, tools, name, tags))
        yield from _beside(cursor, tags)
    yield from skip(cursor, tags.end_call)


def _beside(cursor: Cursor, tags: Tags) -> Reading[None]:
    """Read white space and marks that say nothing."""
    yield from spaces(cursor)
    while (yield from skip(cursor, *tags.beside)):
        yield from spaces(cursor)


def _arguments(cursor: Cursor, tools: Tools, name: str, tags: Tags) -> Reading[None]:
    """Read arguments between tags, or functionary's JSON."""
    yield from spaces(cursor)
    if (yield from starts_with(cursor, ("{",))):
        yield from JsonReader(cursor, (tags.end_function, tags.end_call)).object()
        yield from spaces(cursor)
        yield from skip(cursor, tags.end_function)
        return
    places = tools.places(name)
    members, ends = Members(places), tags.ends(places)
    kinds = dict(zip(tags.kinds, KINDS, strict=False))  # most notations name none
    while (yield from skip(cursor, tags.parameter)):
        key = (yield from declared(cursor, places, tags.end_name)) or (yield from _name(cursor, tags.end_name))
        kind = (yield from skip(cursor, *tags.kinds, ">")) if tags.kinds else ""
        yield from members.add(key, Value(cursor, tags.end_parameter, ends, tags.lines), kinds.get(kind, TYPES))
        yield from spaces(cursor)
    ended = (yield from skip(cursor, tags.end_function)) or (yield from starts_with(cursor, (tags.end_call,)))
    if not ended and (cursor.buffer or not cursor.complete):
        raise MalformedError("a parameter is expected")
    yield from members.close()


def _name(cursor: Cursor, end: str) -> Reading[str]:
    """Return the name in an opening tag, without quotes. Models sometimes omit what closes the tag."""
    name = yield from until(cursor, f"{end[0]}\n")
    yield from skip(cursor, end)
    if not name.strip():
        raise MalformedError("no name")
    return name.strip().strip('"')
