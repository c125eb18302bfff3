"""Values that models write without quotes, typed by the tool's JSON schema."""

from __future__ import annotations

import ast
from typing import Any

import orjson

__all__ = ["convert", "is_text"]

KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
NOT_PYTHON = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)
NOT_JSON = object()


def is_text(schema: Any) -> bool:
    """Return whether the value can only be a string, so that it can be passed on while it is written."""
    return _types(schema) == {"string"}


def convert(text: str, schema: Any) -> str:
    """Return the value as JSON text. A value that does not fit the schema stays a string: the tool's check names the
    fault.
    """
    types = _types(schema)
    value = _parse(text.strip())
    if value is NOT_JSON:
        return _dump(text)
    kind = _kind(value)
    if "string" in types and kind != "null":
        return _dump(text)
    if not types:  # unknown type: a value stays text unless it can hardly be meant as text
        return _dump(value if kind in ("object", "array") else text)
    if kind == "number" and value == int(value) and "number" not in types and "integer" in types:
        return _dump(int(value))
    fits = kind in types or (kind == "integer" and "number" in types)
    return _dump(value if fits else text)


def _types(schema: Any, depth: int = 8) -> set[str]:
    """Return the JSON types that a schema allows; empty means unknown."""
    if not isinstance(schema, dict) or not depth:
        return set()
    stated = schema.get("type")
    if isinstance(stated, str):
        return {stated}
    if isinstance(stated, list):
        return {one for one in stated if isinstance(one, str)}
    if isinstance(schema.get("enum"), list):
        return {_kind(value) for value in schema["enum"]}
    if "const" in schema:
        return {_kind(schema["const"])}
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            branches = [_types(branch, depth - 1) for branch in schema[name]]
            return set().union(*branches) if all(branches) else set()
    return set()


def _kind(value: Any) -> str:
    return KINDS.get(type(value), "null")


def _parse(text: str) -> Any:
    """Parse JSON, or a Python literal, which models sometimes write."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        value = ast.literal_eval(text)
        orjson.dumps(value)
    except NOT_PYTHON:
        return NOT_JSON
    return value if type(value) in KINDS or value is None else NOT_JSON


def _dump(value: Any) -> str:
    return orjson.dumps(value).decode()
