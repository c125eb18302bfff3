"""The required form of an answer's text, read from every spelling that clients use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..big_json import loads
from ..http.errors import refusal, require
from .lark import LARGEST

OUTPUT_FIELDS = ("response_format", "structured_outputs", "json_schema", "grammar")
_STRUCTURED = ("json", "json_object", "regex", "choice", "grammar")  # in structured_outputs
Kind = Literal["json_object", "json_schema", "regex", "grammar", "choice"]

_MOST_CHOICES = 10_000
_GBNF = re.compile(r"^[^\S\n]*[\w-]+\s*::=", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The required form of an answer's text.

    Attributes:
        value: a schema (dict), a regular expression, a Lark grammar, or texts to choose from; for "json_object" unused.
        strict: parts of a schema that can't be enforced are refused, not ignored with a warning.
        field: name of the field in errors.
    """

    kind: Kind
    value: Any = None
    strict: bool = False
    field: str = "response_format"


def parse_response_format(body: Mapping[str, Any]) -> OutputFormat | None:
    """Return the format that a body asks for in one of OUTPUT_FIELDS, None for free text.

    null and empty values ask for nothing.

    Raises:
        InvalidRequestError: names the field; also when two fields ask for something.
    """
    requested = {
        name: _read(name, body[name], name) for name in OUTPUT_FIELDS if body.get(name) not in (None, "", {}, [])
    }
    formats = {name: output for name, output in requested.items() if output is not None}
    if len(formats) > 1:
        raise refusal(list(formats)[1], f"can't be combined with {next(iter(formats))}")
    return next(iter(formats.values()), None)


def _read(name: str, value: Any, field: str) -> OutputFormat | None:
    """Read a form by its name in OUTPUT_FIELDS or in `structured_outputs`."""
    match name:
        case "response_format":
            return response_format(value, field)
        case "structured_outputs":
            return _structured_outputs(value, field)
        case "json" | "json_schema":
            return _json_or_text(value, field)
        case "json_object":
            return OutputFormat("json_object", field=field)
        case "regex":
            return _regex(value, field)
        case "choice":
            return _choice(value, field)
    return _grammar(value, field)


def response_format(value: Any, field: str) -> OutputFormat | None:
    """Read the object of chat completions, of responses, which omit its inner level, or of messages.

    Raises:
        InvalidRequestError: it is none of them.
    """
    if value is None:
        return None
    match value.get("type") if isinstance(value, dict) else None:
        case "text":
            return None
        case "json_object":  # llama.cpp puts the schema beside the type
            schema = value.get("schema")
            return OutputFormat("json_object", field=field) if schema is None else _json(schema, f"{field}.schema")
        case "json_schema":
            return _json_schema(value, field)
    where = f"{field}.type" if isinstance(value, dict) else field
    raise refusal(where, "must be {'type': 'text'}, {'type': 'json_object'} or {'type': 'json_schema', ...}")


def _json_schema(value: dict[str, Any], field: str) -> OutputFormat:
    inner = value.get("json_schema", value)
    field = f"{field}.json_schema" if inner is not value else field
    if not isinstance(inner, dict) or inner.get("schema") is None:
        raise refusal(f"{field}.schema", "is missing")
    strict = inner.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise refusal(f"{field}.strict", "must be true or false")
    return _json(inner["schema"], f"{field}.schema", strict is True)


def _json(value: Any, field: str, strict: bool = False) -> OutputFormat:
    if not isinstance(value, dict):
        raise refusal(field, "must be a JSON schema (an object)")
    return OutputFormat("json_schema", value, strict, field)


def _json_or_text(value: Any, field: str) -> OutputFormat:
    """Read a schema as JSON or as text, which vLLM accepts too."""
    if isinstance(value, str):
        require(len(value) <= LARGEST, field, f"must have at most {LARGEST} characters")
        try:
            value = loads(value)
        except ValueError as error:
            raise refusal(field, f"is not JSON: {error}") from error
    return _json(value, field)


def _regex(value: Any, field: str) -> OutputFormat:
    if not isinstance(value, str):
        raise refusal(field, "must be a regular expression (a string)")
    return OutputFormat("regex", value, field=field)


def _choice(value: Any, field: str) -> OutputFormat:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise refusal(field, "must be a non-empty array of strings")
    if len(value) > _MOST_CHOICES:
        raise refusal(field, f"at most {_MOST_CHOICES} choices are supported")
    return OutputFormat("choice", tuple(value), field=field)


def _grammar(value: Any, field: str) -> OutputFormat:
    if not isinstance(value, str):
        raise refusal(field, "must be a Lark grammar (a string)")
    if _GBNF.search(value):
        raise refusal(field, "GBNF ('name ::= ...') is not supported; write the grammar in Lark ('start: ...')")
    return OutputFormat("grammar", value, field=field)


def _structured_outputs(value: Any, field: str) -> OutputFormat | None:
    """Read vLLM's object with one of several keys."""
    if not isinstance(value, dict):
        raise refusal(field, "must be an object with one of json, json_object, regex, choice, grammar")
    given = {name: form for name, form in value.items() if form not in (None, False)}
    if len(given) != 1:
        raise refusal(field, "must have exactly one of json, json_object, regex, choice, grammar")
    ((name, form),) = given.items()
    if name not in _STRUCTURED:
        raise refusal(f"{field}.{name}", "not supported; use json, json_object, regex, choice or grammar")
    return _read(name, form, f"{field}.{name}")
