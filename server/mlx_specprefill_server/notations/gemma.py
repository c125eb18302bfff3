"""Gemma's calls: keys without quotes, and texts between marks. FunctionGemma's tokenizer has other marks."""

from __future__ import annotations

from collections.abc import Callable

from ..parsers.base import Cursor, MalformedError, Reading, Tools, skip, spaces, starts_with
from ..parsers.call_parts import CallReader, call, expect, until
from ..parsers.json_text import JsonReader
from ..parsers.tagged import Bare
from .declaration import Notation, Written

# opening mark, end mark, the mark around texts
GEMMA_4 = ("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = ("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA_CALL = "call:"


def gemma_reader(opener: str, closer: str, quote: str) -> CallReader:
    """Return a reader of `<opener>call:name{key:value,...}<closer>`, with strings between two `quote` marks."""

    def read(cursor: Cursor, tools: Tools) -> Reading[None]:
        yield from expect(cursor, opener)
        yield from spaces(cursor)
        yield from _read_gemma(cursor, tools.name, quote)
        yield from skip(cursor, closer)

    return read


def read_bare_gemma(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Read calls without the mark that opens them. Only a known tool is one."""

    def known(raw: str) -> str:
        if (name := tools.name(raw)) not in tools:
            raise MalformedError("no such tool")
        return name

    _, closer, quote = GEMMA_4
    while (yield from starts_with(cursor, (GEMMA_CALL,))):
        yield from _read_gemma(cursor, known, quote)
        yield from skip(cursor, closer)
        yield from spaces(cursor)


def _read_gemma(cursor: Cursor, name_of: Callable[[str], str], quote: str) -> Reading[None]:
    yield from expect(cursor, GEMMA_CALL)
    name = name_of((yield from until(cursor, "{", never=' "[\n}')))
    yield from call(name, JsonReader(cursor, quote=quote).object())
    yield from spaces(cursor)


OPEN, END, QUOTE = GEMMA_4
GEMMA = Notation(
    marks=(GEMMA_4[:2], FUNCTION_GEMMA[:1]),
    readers={mark[0]: gemma_reader(*mark) for mark in (GEMMA_4, FUNCTION_GEMMA)},
    bare=Bare(read_bare_gemma, (GEMMA_CALL,), ()),
    think=("<|channel>thought", "<channel|>"),
    again=True,
    text=Written(f"{OPEN}call:{{name}}{{input:{QUOTE}{{input}}{QUOTE}}}{END}", excluded=(QUOTE,)),
    begun=(OPEN, END),
)
