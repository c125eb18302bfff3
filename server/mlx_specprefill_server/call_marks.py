"""The forms of notations whose calls stand between marks: a name with JSON, and a tag for each argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

# The marks that end a value, each with the texts of which one must follow; none: any.
Ends = Mapping[str, Sequence[str]]


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

    def ends(self, names: Iterable[str] = ()) -> Ends:
        """Return the ends of a value. Models sometimes omit its end tag, also before parameters of these names."""
        return {
            self.end_parameter: (self.parameter, self.end_function, self.end_call, self.function, self.call),
            self.end_function: (self.end_call, self.function, self.call),
            self.end_call: (self.call,),
            f"\n{self.parameter}": tuple(f"{name}{self.end_name}" for name in names),
        }


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
