"""The forms of notations whose calls stand between marks: a name with JSON, and a tag for each argument."""

from __future__ import annotations

from typing import NamedTuple


class Marks(NamedTuple):
    """The marks of a notation with a name and JSON: around all calls, around each, and before its arguments."""

    section: str
    end_section: str
    call: str
    end_call: str
    arguments: str


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
