"""A reader of text that knows whether it is in code: in a fence of Markdown, or between backticks."""

from __future__ import annotations

import re

LONGEST_HEAD = 256  # characters of a line that are looked at for a fence
FENCE_LINE = re.compile(r"\s*(`{3,}|~{3,})(.*)", re.DOTALL)


class Code:
    """The state of a text that comes in pieces. It is true while the text so far ends in code."""

    def __init__(self) -> None:
        self._fence = ""  # as it was opened
        self._head = ""  # of the last line
        self._is_quoted = False

    def __bool__(self) -> bool:
        return bool(self._fence) or self._is_quoted

    def read(self, text: str) -> None:
        first, *others = text.split("\n")
        self._read_line(first)
        for line in others:
            self._end_line()
            self._read_line(line)

    def _read_line(self, text: str) -> None:
        self._head += text[: LONGEST_HEAD - len(self._head)]
        self._is_quoted ^= text.count("`") % 2 == 1

    def _end_line(self) -> None:
        found = FENCE_LINE.fullmatch(self._head)
        if found and not self._fence:
            self._fence = found[1] if "`" not in found[2] else ""
        elif found and found[1].startswith(self._fence) and not found[2].strip():
            self._fence = ""
        self._head, self._is_quoted = "", False
