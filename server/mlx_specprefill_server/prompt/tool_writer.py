"""The text of a single tool as a chat template writes it, for results that load tools."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from mlx_specprefill import InvalidRequestError

from ..big_json import dumps
from .deferred import Tool
from .form_probe import TOOLS, Show
from .forms import Form
from .probe_messages import NAME, OTHER, user
from .spans import length_in_common


class ToolWriter:
    """A writer of single tools as a chat template writes them.

    The template renders a pair of tools that differ in name alone. What is alike around both names is the writing of
    one tool, and what is left between them separates two. A tool is then rendered as the second of two, and cut out.

    Args:
        show: the template; refusals raise InvalidRequestError.
        form: of conversations with tools.
    """

    def __init__(self, show: Show, form: Form) -> None:
        self._show = show
        self._form = form

    def write(self, tool: Tool) -> str:
        """Return the tool as the template writes it, or as JSON where the template shows no tools of their own."""
        written = "" if self._frame is None else self._cut(tool, *self._frame)
        return written or dumps(tool["function"]).decode()

    def _cut(self, tool: Tool, before: str, after: str) -> str:
        """Return what stands between the first tool with its separator and the text behind all tools."""
        text = self._text((TOOLS[0], tool))
        start, end = text.find(before), text.rfind(after)
        return text[start + len(before) : end].strip() if 0 <= start <= end - len(before) else ""

    def _text(self, tools: Sequence[Tool]) -> str:
        try:
            return self._show(self._form, [user("zqu1")], tools)
        except InvalidRequestError:
            return ""

    @cached_property
    def _frame(self) -> tuple[str, str] | None:
        """The text from the first tool's name to the second tool, and that behind the second; None: there is none."""
        text = self._text(TOOLS)
        first, last = text.find(NAME), text.rfind(NAME) + len(NAME)
        begins, ends = text.find(OTHER), text.rfind(OTHER) + len(OTHER)
        if not (self._form.shows_tools and 0 <= first < last <= begins):
            return None
        between = text[last:begins]
        head = length_in_common(text[:first][::-1], between[::-1])
        tail = length_in_common(text[ends:], between)
        cut = _border(between, len(between) - head, tail)
        return text[first:last] + between[:cut], text[ends + min(tail, cut) :]


def _border(between: str, start: int, tail: int) -> int:
    """Return where the second tool begins between the names of two.

    Args:
        start: the earliest place, from which on the text is as that before the first name.
        tail: the latest end of the first tool. Behind `start`, both may claim the same text: white space parts them.
    """
    return next((at for at in range(tail, start, -1) if between[at - 1].isspace()), start)
