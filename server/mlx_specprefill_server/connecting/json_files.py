"""JSON files, with comments and trailing commas as editors allow them, changed without touching the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .values import ConfigurationError, Default, Entry, Values

__all__ = ["changed", "data_of", "written"]

_SKIPPED = re.compile(r"(?:\s|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_REST_OF_LINE = re.compile(r"([ \t]*,)?[ \t]*(?://[^\r\n]*|/\*[^\n]*?\*/[ \t]*)?(?=\r?\n)")
_UNIT = "  "


def data_of(text: str) -> dict[str, Any]:
    """What the file says; an empty one says nothing.

    Raises:
        ConfigurationError: it is no JSON object.
    """
    return {} if _is_empty(text) else _object(text).data()


def written(data: Mapping[str, Any]) -> str:
    """A whole file."""
    return json.dumps(data, indent=_UNIT, ensure_ascii=False) + "\n"


def changed(text: str, values: Values) -> str:
    """The text with the values in it.

    Raises:
        ConfigurationError: as `data_of`.
    """
    if _is_empty(text):
        text += ("" if not text or text.endswith("\n") else "\n") + "{}\n"
    for path, value in _steps(values):
        text = _set(text, path, value)
    return text


@dataclass(slots=True)
class _Node:
    """A value in the text, from `start` to `end`. Containers have their parts, objects with names."""

    start: int
    end: int = 0
    value: Any = None
    parts: list[_Node] = field(default_factory=list)
    names: list[str] | None = None  # None: no object
    begins: list[int] = field(default_factory=list)  # of each part, with its name

    def member(self, name: str) -> _Node | None:
        """The last one counts, as for every reader."""
        places = [i for i, other in enumerate(self.names or []) if other == name]
        return self.parts[places[-1]] if places else None

    def data(self) -> Any:
        if self.names is not None:
            return {name: part.data() for name, part in zip(self.names, self.parts, strict=True)}
        return [part.data() for part in self.parts] if isinstance(self.value, list) else self.value


class _Reader:
    """Reads values and notes where they stand."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def whole(self) -> _Node:
        node = self.value()
        self._skip()
        if self.at != len(self.text):
            self._fail("nothing is expected here")
        return node

    def value(self) -> _Node:
        self._skip()
        node = _Node(self.at)
        opening = self.text[self.at : self.at + 1]
        if opening in ("{", "["):
            self._container(node, opening)
        else:
            try:
                node.value, self.at = json.JSONDecoder().raw_decode(self.text, self.at)
            except json.JSONDecodeError:
                self._fail("a value is expected")
        node.end = self.at
        return node

    def _container(self, node: _Node, opening: str) -> None:
        closing = "}" if opening == "{" else "]"
        node.names, node.value = ([], None) if opening == "{" else (None, [])
        self.at += 1
        while not self._takes(closing):
            if node.parts and not self._takes(","):
                self._fail(f"a comma or {closing} is expected")
            if self._takes(closing):  # behind a trailing comma
                return
            node.begins.append(self.at)
            if node.names is not None:
                node.names.append(self._name())
            node.parts.append(self.value())

    def _name(self) -> str:
        name = self.value().value if self.text.startswith('"', self.at) else None
        if not isinstance(name, str) or not self._takes(":"):
            self._fail('"name": is expected')
        return str(name)

    def _takes(self, mark: str) -> bool:
        self._skip()
        found = self.text.startswith(mark, self.at)
        self.at += len(mark) * found
        return found

    def _skip(self) -> None:
        match = _SKIPPED.match(self.text, self.at)
        assert match is not None
        self.at = match.end()

    def _fail(self, why: str) -> None:
        line = self.text.count("\n", 0, self.at) + 1
        raise ConfigurationError(f"line {line} is no JSON: {why}")


def _is_empty(text: str) -> bool:
    match = _SKIPPED.match(text)
    return match is not None and match.end() == len(text)


def _object(text: str) -> _Node:
    node = _Reader(text).whole()
    if node.names is None:
        raise ConfigurationError("it is no JSON object")
    return node


def _steps(values: Values, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each value that is no mapping, with its path."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _steps(value, (*path, name)) if value else [((*path, name), Default({}))]
        else:
            yield (*path, name), value


def _set(text: str, path: tuple[str, ...], value: Any) -> str:
    """One value in its place. What is missing on the way there is made."""
    node = _object(text)
    for depth, name in enumerate(path):
        found = node.member(name)
        if found is None:
            rest: Any = _initial(value)
            for missing in reversed(path[depth + 1 :]):
                rest = {missing: rest}
            return _inserted(text, node, rest, name)
        node = found
    if isinstance(value, Default):
        return text
    if not isinstance(value, Entry):
        return text if node.data() == value else _replaced(text, node, value)
    entries = node.data() or []
    place = value.place(entries)
    if node.data() is None:
        return _replaced(text, node, [value.value])
    return _replaced(text, node.parts[place], value.value) if place is not None else _inserted(text, node, value.value)


def _initial(value: Any) -> Any:
    match value:
        case Default():
            return value.value
        case Entry():
            return [value.value]
    return value


def _replaced(text: str, node: _Node, value: Any) -> str:
    return text[: node.start] + _dumped(text, value, _indent_at(text, node.start)) + text[node.end :]


def _inserted(text: str, node: _Node, value: Any, name: str | None = None) -> str:
    """A new last member of an object, or a new first entry of a list."""
    outer = _indent_at(text, node.start)
    head = "" if name is None else f"{json.dumps(name, ensure_ascii=False)}: "
    if "\n" not in text[node.start : node.end] and node.parts:
        entry = head + json.dumps(value, ensure_ascii=False)
        at = node.parts[-1].end if name is not None else node.parts[0].start
        return text[:at] + (f", {entry}" if name is not None else f"{entry}, ") + text[at:]
    inner = _indent_at(text, node.begins[0]) if node.parts else outer + _unit(text)
    entry = _newline(text) + inner + head + _dumped(text, value, inner)
    if not node.parts:
        return text[: node.end - 1].rstrip() + entry + _newline(text) + outer + text[node.end - 1 :]
    if name is None:
        return text[: node.start + 1] + entry + "," + text[node.start + 1 :]
    return _behind(text, node.parts[-1].end, entry)


def _behind(text: str, end: int, entry: str) -> str:
    """Behind the last member and the comment on its line; a comma comes between them."""
    rest = _REST_OF_LINE.match(text, end)
    if rest is None:
        return f"{text[:end]},{entry}{text[end:]}"
    comma = "" if rest[1] else ","
    return text[:end] + comma + text[end : rest.end()] + entry + ("," if rest[1] else "") + text[rest.end() :]


def _dumped(text: str, value: Any, indent: str) -> str:
    lines = json.dumps(value, indent=_unit(text), ensure_ascii=False).split("\n")
    return f"{_newline(text)}{indent}".join(lines)


def _indent_at(text: str, at: int) -> str:
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _unit(text: str) -> str:
    """How the file indents."""
    found = re.search(r'^([ \t]+)"', text, re.MULTILINE)
    return found[1] if found else _UNIT


def _newline(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"
