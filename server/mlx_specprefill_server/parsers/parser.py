"""The driver that feeds text to a format's grammar, the tools that it knows, and plain text, which has no grammar."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ..deltas import ContentDelta, TextDelta
from .cursor import Cursor

__all__ = ["Machine", "MalformedError", "Parser", "PlainText", "Reading", "Tools"]

T = TypeVar("T")

NAME = re.compile(r"[\w.:/-]{1,256}")


# Every reading step is a generator: it yields deltas, or None when it needs more text, and returns what it read.
Reading = Generator[ContentDelta | None, None, T]


class MalformedError(Exception):
    """The text at the cursor can't be part of a call."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The functions that the model may call: their parameters' schemas by name."""

    properties: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]]) -> Tools:
        """From OpenAI's function tools. Schemas come from clients: whatever is not a mapping counts as absent."""
        return cls({tool["function"]["name"]: _properties(tool["function"].get("parameters")) for tool in tools})

    def __bool__(self) -> bool:
        return bool(self.properties)

    def schema(self, tool: str, parameter: str) -> Any:
        """None when the tool says nothing of this parameter."""
        return self.properties.get(tool, {}).get(parameter)

    def name(self, raw: str) -> str:
        """The tool that is meant. Models leak control tokens and namespaces into names.

        Raises:
            MalformedError: this is no name.
        """
        name = raw.strip().partition("<|")[0].strip()
        if name not in self.properties and name.removeprefix("functions.") in self.properties:
            name = name.removeprefix("functions.")
        if not NAME.fullmatch(name):
            raise MalformedError(f"not a name: {raw[:40]!r}")
        return name


def _properties(parameters: Any) -> Mapping[str, Any]:
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {name: _referred(schema, parameters) for name, schema in properties.items()}


def _referred(schema: Any, root: Any) -> Any:
    """The schema that a local reference means; others stay as they are."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    for step in reference.split("/")[1:]:
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return schema if root is None else root


class Machine(Protocol):
    """The grammar of one output format. `thinking`: what comes now is reasoning."""

    @property
    def thinking(self) -> bool: ...
    def run(self, cursor: Cursor) -> Reading[None]: ...


class PlainText:
    """The grammar of text without reasoning or calls: everything is visible."""

    thinking = False

    def run(self, cursor: Cursor) -> Reading[None]:
        while True:
            if cursor.buffer:
                start = cursor.offset
                cursor.mark()
                yield TextDelta(cursor.take(len(cursor.buffer)), start=start)
            if cursor.ended:
                return
            yield None


class Parser:
    """Feeds one answer to a machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._cursor = Cursor()
        self._deltas = machine.run(self._cursor)

    @property
    def thinking(self) -> bool:
        return self._machine.thinking

    def push(self, text: str) -> list[ContentDelta]:
        """What more text makes certain, often nothing."""
        self._cursor.feed(text)
        return self._ready()

    def finish(self, complete: bool) -> list[ContentDelta]:
        """The rest.

        Args:
            complete: the model ended its answer itself; False: it was cut off.
        """
        self._cursor.end(complete)
        return self._ready()

    def _ready(self) -> list[ContentDelta]:
        out = []
        for delta in self._deltas:
            if delta is None:
                break
            out.append(delta)
        return out
