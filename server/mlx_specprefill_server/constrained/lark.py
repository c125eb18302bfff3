"""Grammars in llguidance's Lark dialect, and the parts of a JSON schema that they can enforce."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from mlx_specprefill import InvalidRequestError

from ..errors import refusal
from ..parsers.base import resolve

Schema = dict[str, Any]

# Keywords of JSON Schema. Other words say nothing about values.
_NOT_ENFORCED = frozenset(
    "not if then else uniqueItems contains minContains maxContains propertyNames dependentRequired dependentSchemas "
    "dependencies unevaluatedItems unevaluatedProperties $dynamicRef $recursiveRef".split()
)
_CONDITIONS = frozenset({"if", "not", "dependentSchemas", "dependencies"})
_SILENT = frozenset({"$dynamicAnchor", "$recursiveAnchor"})  # they only name places
_HARMLESS: Mapping[str, tuple[Any, ...]] = {"uniqueItems": (False,), "unevaluatedItems": (True,),
                                            "unevaluatedProperties": (True,), "propertyNames": ({}, True)}  # fmt: skip
_FORMATS = frozenset("date date-time time duration email hostname ipv4 ipv6 uuid uri unknown".split())
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # schemas by name
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_BEYOND_REGEX = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<")  # look-around and back-references
_PATTERN_RULE = "look-around and back-references are not supported"


class EnforceableSchema:
    """The part of a schema that can be enforced.

    Attributes:
        schema: the schema without the other parts. A oneOf of exclusive branches becomes an anyOf, which is the same.
        left_out: a sentence for each part that was left out.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._root = schema
        self.left_out: list[str] = []
        self.schema: Schema = self._of(dict(schema), ())

    def _of(self, schema: Any, path: tuple[str, ...]) -> Any:
        if not isinstance(schema, dict):
            return schema
        out = {word: value for word, value in schema.items() if self._is_enforced(word, value, path)}
        if not _CONDITIONS.isdisjoint(schema):
            out.setdefault("additionalProperties", True)  # members that only a condition describes
        for word in _NAMED:
            if isinstance(named := out.get(word), dict):
                out[word] = {name: self._of(inner, (*path, word, name)) for name, inner in named.items()}
        for word in _LISTED:
            if isinstance(listed := out.get(word), list):
                out[word] = [self._of(inner, (*path, word, str(i))) for i, inner in enumerate(listed)]
        for word in _SINGLE:
            if isinstance(inner := out.get(word), dict):
                out[word] = self._of(inner, (*path, word))
        return self._one_of(out, path)

    def _is_enforced(self, word: str, value: Any, path: tuple[str, ...]) -> bool:
        if word in _SILENT:
            return False
        if word in _NOT_ENFORCED:
            if not any(value == harmless and type(value) is type(harmless) for harmless in _HARMLESS.get(word, ())):
                self._leave_out(word, path, "is not supported")
            return False
        if word == "format" and isinstance(value, str) and value not in _FORMATS:
            self._leave_out(word, path, f"is not supported for {value[:60]!r}")
            return False
        if word == "pattern" and isinstance(value, str) and _BEYOND_REGEX.search(value):
            self._leave_out(word, path, f"is not supported: {_PATTERN_RULE}")
            return False
        if word == "patternProperties" and isinstance(value, dict) and any(map(_BEYOND_REGEX.search, value)):
            self._leave_out(word, path, f"is not supported: {_PATTERN_RULE}")
            return False
        if word == "$ref" and isinstance(value, str) and not value.startswith("#"):
            self._leave_out(word, path, f"is not supported to another document ({value[:60]!r})")
            return False
        return True

    def _one_of(self, schema: Schema, path: tuple[str, ...]) -> Schema:
        branches = schema.get("oneOf")
        if not isinstance(branches, list) or not branches or "anyOf" in schema:
            return schema
        if not self._exclusive(branches):
            self._leave_out("oneOf", path, "is taken as anyOf: its branches differ neither in type nor in a constant")
        return {"anyOf" if word == "oneOf" else word: value for word, value in schema.items()}

    def _leave_out(self, word: str, path: tuple[str, ...], why: str) -> None:
        self.left_out.append(f"`{word}` at {'.'.join(path) or 'the top'} {why}")

    def _exclusive(self, branches: Sequence[Any]) -> bool:
        """Return whether no value can match two of the branches."""
        meant = [mapping_of(resolve(branch, self._root)) for branch in branches]
        return all(_disjoint(one, other) for i, one in enumerate(meant) for other in meant[:i])


def _disjoint(one: Schema, other: Schema) -> bool:
    types, others = types_of(one), types_of(other)
    if (types and others and not types & others) or _differ(one, other):
        return True
    if not (types == others == {"object"}):
        return False
    members = [mapping_of(schema.get("properties")) for schema in (one, other)]
    required = [name for name in items_of(one.get("required")) if name in items_of(other.get("required"))]
    return any(_differ(*(member.get(name) for member in members)) for name in required if isinstance(name, str))


def _differ(one: Any, other: Any) -> bool:
    """Return whether both schemas list their values and have none in common."""
    values, others = _values(one), _values(other)
    return values is not None and others is not None and not any(value in others for value in values)


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """Return the allowed JSON types; empty means any. A number may be an integer."""
    kind = schema.get("type")
    named = {name for name in [kind, *items_of(kind)] if isinstance(name, str)}
    return named | {"integer"} if "number" in named else named


def _values(schema: Any) -> list[Any] | None:
    """Return the only values that match a schema, None if it lists none."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def mapping_of(value: Any) -> Schema:
    """Return an object of a schema, an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def items_of(value: Any) -> list[Any]:
    """Return an array of a schema, an empty one for anything else."""
    return value if isinstance(value, list) else []


# At most one space, where people write one. A model could fill its whole answer with free whitespace.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_ESCAPED_OR_SPECIAL = re.compile(r"\\.|/|\n", re.DOTALL)


class Lark:
    """A grammar under construction. Its methods return names that other rules can refer to.

    Args:
        special: the tokenizer's added tokens. In a literal they stand for themselves, not for their spelling.

    Attributes:
        warnings: sentences about parts of schemas that are not enforced.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self.special = special
        self.warnings: list[str] = []
        self._rules: dict[str, str] = {}
        markers = sorted(filter(None, special), key=len, reverse=True)
        self._markers = re.compile(f"({'|'.join(map(re.escape, markers))})") if markers else None

    def text(self) -> str:
        """Return the whole grammar."""
        return "\n".join(f"{name}: {body}" for name, body in self._rules.items())

    def define(self, name: str, body: str) -> str:
        """Add a rule (lower case) or a terminal (upper case) with this very name."""
        self._rules[name] = body
        return name.partition("[")[0]

    def rule(self, kind: str, body: str, options: str = "") -> str:
        """Add a rule with a unique name."""
        return self.define(f"{kind}_{len(self._rules)}{options}", body)

    def literal(self, text: str) -> str:
        """Return exactly this text, with special tokens as tokens."""
        parts = self._markers.split(text) if self._markers else [text]
        return " ".join(f"<[{self.special[p]}]>" if p in self.special else _quote(p) for p in parts if p) or '""'

    def any_of(self, texts: Iterable[str]) -> str:
        """Return a choice of several literal texts."""
        return self.rule("choice", " | ".join(_quote(text) for text in texts))

    def json(self, schema: Mapping[str, Any], strict: bool = True, field: str = "schema") -> str:
        """Return JSON that matches a schema. Unless `strict`, keywords that can't be enforced are ignored with a
        warning.

        Raises:
            InvalidRequestError: the schema is nested too deeply, or holds such a keyword.
        """
        enforced = self.enforceable(schema, strict, field)
        try:
            text = orjson.dumps({**enforced, "x-guidance": {**_COMPACT, "lenient": not strict}}).decode()
        except TypeError as error:
            raise refusal(field, f"the schema can't be read: {error}") from error
        return self.rule("json", f"%json {text}")

    def enforceable(self, schema: Mapping[str, Any], strict: bool, field: str, whose: str = "") -> Schema:
        """Return a schema without the keywords that can't be enforced.

        Args:
            whose: name of the schema in messages, besides `field`.

        Raises:
            InvalidRequestError: `strict`, and the schema has such keywords. The message names them and their places.
        """
        part = EnforceableSchema(schema)
        sentences = [f"{field}: {whose}{sentence}" for sentence in part.left_out]
        if strict and sentences:
            raise InvalidRequestError(sentences[0], field=field)
        self.warnings += [sentence for sentence in sentences if sentence not in self.warnings]
        return part.schema

    def regex(self, pattern: str) -> str:
        """Return text that matches a regular expression as a whole."""
        body = _ESCAPED_OR_SPECIAL.sub(lambda m: {"/": r"\/", "\n": r"\n"}.get(m[0], m[0]), pattern)
        return self.rule("regex", f"/(?:{body})/")

    def free_text(self, end: str) -> str:
        """Return any text up to and including the literal `end`."""
        if end in self.special:
            return self.rule("text", f"{self.define('ANY', '/(?s:.)*/')} {self.literal(end)}")
        return self.rule("text", "/(?s:.)*/", f"[suffix={_quote(end)}]")

    def analysis(self) -> str:
        """Return the rule of the reasoning that harmony's models may write before they answer or call."""
        end = self.free_text("<|end|>")
        start, again = self.literal("<|channel|>analysis<|message|>"), self.literal("<|start|>assistant")
        return self.rule("analysis", f"({start} {end} {again})?")


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
