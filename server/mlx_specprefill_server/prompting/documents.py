"""Documents inside a system message, told from instructions by their length and by what precedes them.

A document is a long text that something announces: a tag or a code fence around it, a heading that names a document or
a file, or a line such as "Here is the handbook:". Whatever nothing announces counts as an instruction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["documents_in"]

SHORTEST = 2000  # characters, about 500 tokens: what is shorter is not worth choosing from
MOST = 256  # announcements that are followed up in one text: each may be searched for its end
_NOUNS = """agreement appendix article attachment book chapter content context contract conversation data doc document
documentation email excerpt file handbook log manual minutes page paper passage record report result source text
transcript""".split()
_NOUN = f"(?:{'|'.join(_NOUNS)}|knowledge[ _-]base)s?"

_TAG = re.compile(r"<([A-Za-z][\w.-]{0,63})(\s[^<>\n]*)?>")
_OF_A_DOCUMENT = re.compile(rf"(?:.*[_.-])?{_NOUN}(?:[_.-].*)?", re.IGNORECASE)
_NAMED = re.compile(r"\b(?:path|file|filename|title|source|src|url|uri)\s*=", re.IGNORECASE)
_FENCE = re.compile(r"(```+|~~~+)")
_HEADING = re.compile(r"(#{1,6})\s+(.*)")
_FILE = re.compile(r"[`*\"']*[\w./\\-]+\.[A-Za-z]\w{0,5}[`*\"':]*")
_TITLE = re.compile(
    rf"(?:the |attached |following |provided |retrieved |relevant )*{_NOUN}\s*(?:$|[:#\d\"'(—–-]|of\b|from\b)",
    re.IGNORECASE,
)
_ANNOUNCED = re.compile(
    rf"(?=.*\b(?:here|below|following|attached|contents? of|text of)\b)(?=.*\b{_NOUN}\b).*:|{_NOUN}\s*[\w ]{{0,20}}:",
    re.IGNORECASE,
)
_BORDER = re.compile(r"^[ \t]*(?:(#{1,6})[ \t]+\S|(?:---+|===+|\*\*\*+)[ \t]*$)", re.MULTILINE)
_LONGEST_LINE = 200  # characters of one that announces


def documents_in(text: str) -> list[tuple[int, int]]:
    """Places [start, end) of the documents in a system message, ascending, without overlap."""
    found: list[tuple[int, int]] = []
    at = followed = 0
    for line_start, line in _lines(text):
        if line_start < at or followed == MOST:
            continue
        place = _announced_by(text, line_start, line)
        followed += place is not None
        if place is not None and place[1] - place[0] >= SHORTEST:
            found.append(place)
            at = place[1]
    return found


def _lines(text: str) -> Iterator[tuple[int, str]]:
    at = 0
    for line in text.splitlines(keepends=True):
        yield at, line
        at += len(line)


def _announced_by(text: str, at: int, line: str) -> tuple[int, int] | None:
    """What the line at `at` announces, if it does; it ends before it starts where no end is found."""
    said = line.strip()
    first = at + len(line) - len(line.lstrip())
    if (tag := _TAG.match(said)) and (_OF_A_DOCUMENT.fullmatch(tag[1]) or _NAMED.search(tag[2] or "")):
        end = text.find(f"</{tag[1]}>", first)
        return first + tag.end(), end
    following = at + len(line)
    if fence := _FENCE.match(said):
        end = text.find(f"\n{fence[1]}", following - 1)
        return following, end
    if len(said) > _LONGEST_LINE:
        return None
    if heading := _HEADING.fullmatch(said):
        named = _TITLE.match(heading[2]) or _FILE.fullmatch(heading[2])
        return (following, _end_of_section(text, following, len(heading[1]))) if named else None
    if _ANNOUNCED.fullmatch(said.strip("*_ ")) or (said.endswith(":") and _FILE.fullmatch(said)):
        if _goes_on_in_marks(text, following):
            return None  # the tag or fence says where it ends
        return following, _end_of_section(text, following, 6)
    return None


def _goes_on_in_marks(text: str, at: int) -> bool:
    rest = text[at : at + _LONGEST_LINE].lstrip()
    return bool(_FENCE.match(rest) or _TAG.match(rest))


def _end_of_section(text: str, start: int, level: int) -> int:
    """Before the next heading of that level or above, or a rule across the page; else the end of the text."""
    for border in _BORDER.finditer(text, start):
        if border.start() > start and (border[1] is None or len(border[1]) <= level):
            return border.start()
    return len(text)
