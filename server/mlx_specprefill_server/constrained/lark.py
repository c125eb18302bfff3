"""Grammars in llguidance's Lark dialect, and the parts of a JSON schema that they can enforce."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from mlx_specprefill import InvalidRequestError

from ..big_json import dumps
from ..errors import refusal
from ..parsers.base import resolve

Schema = dict[str, Any]

# Keywords of JSON Schema. Other words say nothing about values.
_NOT_ENFORCED = frozenset(
    "not if then else uniqueItems contains minContains maxContains propertyNames dependentRequired dependentSchemas "
    "dependencies unevaluatedItems unevaluatedProperties $dynamicRef $recursiveRef".split()
)
_CONDITIONS = frozenset({"if", "not", "dependentSchemas", "dependencies"})
# They only name places, or tell people something.
_SILENT = frozenset({"$dynamicAnchor", "$recursiveAnchor", "title", "description", "default", "examples", "$comment"})
_HARMLESS: Mapping[str, tuple[Any, ...]] = {"uniqueItems": (False,), "unevaluatedItems": (True,),
                                            "unevaluatedProperties": (True,), "propertyNames": ({}, True)}  # fmt: skip
_FORMATS = frozenset("date date-time time duration email hostname ipv4 ipv6 uuid uri unknown".split())
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # schemas by name
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_DEFINITIONS = ("$defs", "definitions")
_BEYOND_REGEX = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<")  # look-around and back-references
_MOST_COMPARED = 32  # branches of a oneOf of which each two are compared
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
        """Return whether no value can match two of the branches, in time that grows with their size."""
        groups: dict[frozenset[str], list[_Branch]] = {}
        for branch in branches:
            meant = _Branch(mapping_of(resolve(branch, self._root)))
            groups.setdefault(meant.types, []).append(meant)
        kinds = list(groups)  # few: there are seven types
        return all(map(_all_differ, groups.values())) and all(
            (one and other and not one & other) or _all_differ([*groups[one], *groups[other]])
            for i, one in enumerate(kinds)
            for other in kinds[:i]
        )


class _Branch:
    """What tells a branch of a oneOf from the others.

    Attributes:
        types: the allowed JSON types; empty means any.
        values: the only values, by "", and those of required members by their names.
    """

    def __init__(self, schema: Schema) -> None:
        self.types = frozenset(types_of(schema))
        listed = {"": _values(schema)}
        if self.types == {"object"}:
            members = mapping_of(schema.get("properties"))
            names = [name for name in items_of(schema.get("required")) if isinstance(name, str)]
            listed |= {f".{name}": _values(members.get(name)) for name in names}
        self.values = {name: set(map(_key, values)) for name, values in listed.items() if values is not None}


def _all_differ(branches: Sequence[_Branch]) -> bool:
    """Return whether no value matches two branches. Each two of a few may differ in another member."""
    if len(branches) > _MOST_COMPARED:
        return _differ(branches)
    return all(_differ((one, other)) for i, one in enumerate(branches) for other in branches[:i])


def _differ(branches: Sequence[_Branch]) -> bool:
    """Return whether all branches list their values, or those of one required member, and no value twice."""
    names = [name for name in branches[0].values if all(name in branch.values for branch in branches)]
    sets = [[branch.values[name] for branch in branches] for name in names]
    return any(len(set[Hashable]().union(*values)) == sum(map(len, values)) for values in sets)


def _key(value: Any) -> Hashable:
    """Return a key that is the same for equal JSON values."""
    if isinstance(value, dict):
        return frozenset((name, _key(inner)) for name, inner in value.items())
    return tuple(map(_key, value)) if isinstance(value, list) else value


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


def _without_unused(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema without definitions that it does not refer to."""
    stores = {word: schema[word] for word in _DEFINITIONS if isinstance(schema.get(word), dict)}
    used: dict[str, Schema] = {word: {} for word in stores}
    todo: list[Any] = [{word: value for word, value in schema.items() if word not in stores}]
    while todo:
        value = todo.pop()
        if isinstance(value, dict) and isinstance(reference := value.get("$ref"), str):
            start, word, name = ([*unquote(reference).split("/"), "", ""])[:3]
            if start != "#" or word not in stores:
                return schema  # it may refer to anything
            name = name.replace("~1", "/").replace("~0", "~")
            if name in stores[word] and name not in used[word]:
                used[word][name] = stores[word][name]
                todo.append(stores[word][name])
        todo += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {**schema, **used}


# At most one space, where people write one. A model could fill its whole answer with free whitespace.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
LARGEST = 1 << 20  # characters of a grammar, as in the library; a larger one is not even built
_ESCAPED_OR_SPECIAL = re.compile(r"\\.|/|\n", re.DOTALL)


class Lark:
    """A grammar under construction. Its methods return names that other rules can refer to.

    Args:
        special: the tokenizer's added tokens. In a literal they stand for themselves, not for their spelling.
        field: of the body, in errors about the whole.

    Attributes:
        warnings: sentences about parts of schemas that are not enforced, in their order.
    """

    def __init__(self, special: Mapping[str, int], field: str) -> None:
        self.special = special
        self.warnings: dict[str, None] = {}
        self._rules: dict[str, str] = {}
        self._names: dict[tuple[str, str, str], str] = {}
        self._field = field
        self._size = 0
        markers = sorted(filter(None, special), key=len, reverse=True)
        self._markers = re.compile(f"({'|'.join(map(re.escape, markers))})") if markers else None

    def text(self) -> str:
        """Return the whole grammar."""
        return "\n".join(f"{name}: {body}" for name, body in self._rules.items())

    def define(self, name: str, body: str) -> str:
        """Add a rule (lower case) or a terminal (upper case) with this very name.

        Raises:
            InvalidRequestError: the grammar is too large.
        """
        self._size += len(body)
        if self._size > LARGEST:
            raise refusal(self._field, f"the grammar has more than {LARGEST} characters")
        self._rules[name] = body
        return name.partition("[")[0]

    def rule(self, kind: str, body: str, options: str = "") -> str:
        """Return a rule with a name of its own, or one that has been added with this body."""
        key = kind, body, options
        if key not in self._names:
            self._names[key] = self.define(f"{kind}_{len(self._rules)}{options}", body)
        return self._names[key]

    def literal(self, text: str) -> str:
        """Return exactly this text, with special tokens as tokens."""
        parts = self._markers.split(text) if self._markers else [text]
        return " ".join(f"<[{self.special[p]}]>" if p in self.special else _quote(p) for p in parts if p) or '""'

    def any_of(self, texts: Iterable[str]) -> str:
        """Return a choice of several literal texts: one terminal, for a parser compares rules one by one."""
        return self.rule("CHOICE", " | ".join(_quote(text) for text in texts))

    def json(self, schema: Mapping[str, Any], strict: bool = True, field: str = "schema") -> str:
        """Return JSON that matches a schema. Unless `strict`, keywords that can't be enforced are ignored with a
        warning.

        Raises:
            InvalidRequestError: the schema is nested too deeply, or holds such a keyword.
        """
        enforced = self.enforceable(_without_unused(schema), strict, field)
        try:
            text = dumps({**enforced, "x-guidance": {**_COMPACT, "lenient": not strict}}).decode()
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
        self.warnings |= dict.fromkeys(sentences)
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
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")
