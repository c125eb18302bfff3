"""YAML files: settings at the top, and entries of lists there, changed without touching the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from .values import ConfigurationError, Default, Entry, Values

__all__ = ["changed", "data_of", "written"]


def data_of(text: str) -> dict[str, Any]:
    """What the file says; an empty one says nothing.

    Raises:
        ConfigurationError: it is no YAML mapping.
    """
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"it is no YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigurationError("it is no YAML mapping")
    return data


def written(data: Mapping[str, Any]) -> str:
    """A whole file."""
    return "".join(_setting(name, value) for name, value in data.items())


def changed(text: str, values: Values) -> str:
    """The text with the values in it.

    Raises:
        ConfigurationError: as `data_of`, or it is not written one setting per line.
    """
    data_of(text)
    for name, value in values.items():
        text = _set(text, name, value)
    return text


def _set(text: str, name: str, value: Any) -> str:
    node = _node(text, name)
    match value:
        case Default() if node is not None:
            return text
        case Default():
            value = value.value
        case Entry() if node is not None and not _is_null(node):
            return _with_entry(text, name, node, value)
        case Entry():
            value = [dict(value.value)]
    if node is None:
        return text + ("" if not text or text.endswith("\n") else "\n") + _setting(name, value)
    start, end = node.start_mark.index, node.end_mark.index
    if isinstance(value, list):
        return text[:start] + "\n" + _block(value, 2).rstrip("\n") + text[end:]
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigurationError(f"{name} is no single value")
    space = " " if text[start - 1 : start] == ":" else ""
    return text[:start] + space + _inline(value) + text[end:]


def _node(text: str, name: str) -> yaml.Node | None:
    """The value of a setting at the top."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None:
        return None
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise ConfigurationError("it is not written one setting per line")
    return next((value for key, value in root.value if key.value == name), None)


def _with_entry(text: str, name: str, node: yaml.Node, entry: Entry) -> str:
    if not isinstance(node, yaml.SequenceNode):
        raise ConfigurationError(f"{name} is no list")
    if node.flow_style and not node.value:
        return (
            text[: node.start_mark.index] + "\n" + _block([entry.value], 2) + text[node.end_mark.index :].lstrip(" \n")
        )
    if node.flow_style:
        raise ConfigurationError(f"{name} is not written one entry per line")
    block = _block([entry.value], node.start_mark.column).splitlines(keepends=True)
    lines = text.splitlines(keepends=True)
    place = entry.place(data_of(text)[name])
    first, last = node.start_mark.line, node.start_mark.line
    if place is not None:
        first, last = node.value[place].start_mark.line, _last_line(node.value[place]) + 1
    return "".join([*lines[:first], *block, *lines[last:]])


def _last_line(node: yaml.Node) -> int:
    """Of what it says; comments and empty lines behind it belong to nobody."""
    if isinstance(node, yaml.ScalarNode) or node.flow_style:
        return int(node.end_mark.line)
    parts = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
    return max(map(_last_line, parts))


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == "tag:yaml.org,2002:null")


def _setting(name: str, value: Any) -> str:
    if isinstance(value, list):
        return f"{_inline(name)}:\n{_block(value, 2)}"
    return f"{_inline(name)}: {_inline(value)}\n"


def _inline(value: Any) -> str:
    """A value on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1 << 20, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _block(entries: list[Mapping[str, Any]], indent: int) -> str:
    """A list of mappings, one entry below the other."""
    lines = []
    for entry in entries:
        marks = "-" + " " * (len(entry) - 1)
        lines += [f"{mark} {_inline(name)}: {_inline(v)}" for mark, (name, v) in zip(marks, entry.items(), strict=True)]
    return "".join(f"{' ' * indent}{line}\n" for line in lines)
