"""The part of a JSON schema that a grammar can enforce, and a sentence about each other part."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from mlx_specprefill import grammar_error

from ..big_json import dumps
from ..schemas import TYPES, Resolver, Together, key_of, listed, mapping_of, members, required, target, types_of

Schema = dict[str, Any]

# Keywords of JSON Schema. Other words say nothing about values.
_NOT_ENFORCED = frozenset(
    "not if then else uniqueItems contains minContains maxContains propertyNames dependentRequired dependentSchemas "
    "dependencies unevaluatedItems unevaluatedProperties $dynamicRef $recursiveRef".split()
)
_CONDITIONS = frozenset({"if", "not", "dependentSchemas", "dependencies"})
# They name places, which have new names in the result, or tell people something; `nullable` is no JSON schema: null
# would not be valid.
_SILENT = frozenset("$dynamicAnchor $recursiveAnchor $anchor $id $defs definitions nullable "
                    "title description default examples $comment".split())  # fmt: skip
_HARMLESS: Mapping[str, tuple[Any, ...]] = {"uniqueItems": (False,), "unevaluatedItems": (True,),
                                            "unevaluatedProperties": (True,), "propertyNames": ({}, True)}  # fmt: skip
_FORMATS = frozenset("date date-time time duration email hostname ipv4 ipv6 uuid uri unknown".split())
_NAMED = ("properties", "patternProperties")  # schemas by name
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_BEYOND_REGEX = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<")  # look-around and back-references
_PATTERN_RULE = "look-around and back-references are not supported"

_PIECES = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]?|.", re.DOTALL)
_ESCAPES = re.compile(r"\\.", re.DOTALL)
_CLASSES = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}  # ASCII in JSON schemas (ECMA-262), Unicode in the grammar library

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Words whose values may be beyond the grammar library, alone or together.
_LIMITS = (
    (*_BOUNDS, "multipleOf"),
    ("pattern", "format", "minLength", "maxLength"),
    ("patternProperties",),
    ("minItems", "maxItems"),
    ("minProperties", "maxProperties"),
)
_MOST_COMPARED = 32  # branches of a oneOf of which each two are compared
_ORDINARY = 2**31  # limits below it are never beyond
_LARGEST_STEP = 4096  # a grammar of larger multiples within bounds has too many states


class EnforceableSchema:
    """The part of a schema that can be enforced.

    Args:
        objection: returns what the grammar library has against a grammar, "" for nothing.

    Attributes:
        schema: the schema without the other parts. A oneOf of exclusive branches becomes an anyOf, which is the same.
            All references point into its `$defs`, whatever the names and places of their targets were.
        left_out: a sentence for each part that was left out.
    """

    def __init__(self, schema: Mapping[str, Any], objection: Callable[[str], str] = grammar_error) -> None:
        self._root = schema
        self._resolver = Resolver(schema)
        self._objection_to = objection
        self._names: dict[str, str] = {}  # of definitions, by the references to them
        self._referred: list[str] = []  # references whose targets are still to be done: chains of them may be long
        self.left_out: list[str] = []
        self.schema: Schema = self._of(dict(schema), ())
        if definitions := dict(self._definitions()):
            self.schema["$defs"] = definitions

    def _of(self, schema: Any, path: tuple[str, ...]) -> Any:
        if not isinstance(schema, dict):
            return schema
        out = {word: value for word, value in schema.items() if self._is_enforced(word, value, path)}
        if not _CONDITIONS.isdisjoint(schema):
            out.setdefault("additionalProperties", True)  # members that only a condition describes
        if isinstance(pattern := out.get("pattern"), str):
            out["pattern"] = _ascii_classes(pattern)
        self._leave_out_limits(out, path)
        if isinstance(reference := out.get("$ref"), str):
            out["$ref"] = f"#/$defs/{self._definition(reference)}"
        for word in _NAMED:
            if isinstance(named := out.get(word), dict):
                out[word] = {name: self._of(inner, (*path, word, name)) for name, inner in named.items()}
        for word in _LISTED:
            if isinstance(branches := out.get(word), list):
                out[word] = [self._of(inner, (*path, word, str(i))) for i, inner in enumerate(branches)]
        for word in _SINGLE:
            if isinstance(inner := out.get(word), dict):
                out[word] = self._of(inner, (*path, word))
        return self._one_of(out, schema.get("oneOf"), path)

    def _definition(self, reference: str) -> str:
        """Return the name of a reference's target in the definitions. A target may refer to itself."""
        if reference not in self._names:
            self._names[reference] = f"d{len(self._names)}"
            self._referred.append(reference)
        return self._names[reference]

    def _definitions(self) -> Iterator[tuple[str, Any]]:
        while self._referred:
            reference = self._referred.pop()
            place = tuple(unquote(reference).split("/")[1:])
            yield self._names[reference], self._of(target(reference, self._root), place)

    def _is_enforced(self, word: str, value: Any, path: tuple[str, ...]) -> bool:
        if word in _SILENT:
            return False
        if word in _NOT_ENFORCED:
            if not any(value == harmless and type(value) is type(harmless) for harmless in _HARMLESS.get(word, ())):
                self._leave_out(word, path, "is not supported")
            return False
        why = self._objection(word, value)
        if why:
            self._leave_out(word, path, f"is not supported{why}")
        return not why

    def _objection(self, word: str, value: Any) -> str:
        """Return what speaks against a keyword's value, whatever stands beside it; "" for nothing."""
        shown = f"{value!r:.60}"
        match word, value:
            case "format", str() if value not in _FORMATS:
                return f" for {shown}"
            case "type", _ if not _names_types(value):
                return f" for {shown}"
            case ("pattern", str()) | ("patternProperties", dict()) if _is_beyond(value):
                return f": {_PATTERN_RULE}"
            case "$ref", str() if target(value, self._root) is None:
                return f": {shown} is not in it" if value.startswith("#") else f" to another document ({shown})"
        return ""

    def _leave_out_limits(self, schema: Schema, path: tuple[str, ...]) -> None:
        """Remove the limits that the grammar library can't follow, alone or together with others."""
        counted = {"minProperties", "maxProperties"} & schema.keys()
        if counted and not set(mapping_of(schema.get("properties"))) <= required((schema,)):
            self._remove(sorted(counted), schema, path, "is supported only where all members are required")
        step = schema.get("multipleOf")
        if isinstance(step, int | float) and step > _LARGEST_STEP:
            self._remove(_BOUNDS, schema, path, f"is not supported beside a `multipleOf` over {_LARGEST_STEP}")
        for group in _LIMITS:
            beyond = [word for word in group if word in schema and not _is_ordinary(schema[word])]
            alone = [word for word in beyond if self._is_refused(schema, [word])]
            self._remove(alone, schema, path, "is beyond what can be enforced")
            left = [word for word in group if word in schema]
            while beyond and left and self._is_refused(schema, group):
                self._remove([left.pop(0)], schema, path, "can't be enforced beside the other limits")

    def _remove(self, words: Iterable[str], schema: Schema, path: tuple[str, ...], why: str) -> None:
        for word in words:
            if schema.pop(word, None) is not None:
                self._leave_out(word, path, why)

    def _one_of(self, schema: Schema, branches: Any, path: tuple[str, ...]) -> Schema:
        """Return the schema with anyOf in place of oneOf, whose branches were `branches`."""
        if not isinstance(branches, list) or not branches or "anyOf" in schema:
            return schema
        if not self._exclusive(branches):
            self._leave_out("oneOf", path, "is taken as anyOf: its branches differ neither in type nor in a constant")
        return {"anyOf" if word == "oneOf" else word: value for word, value in schema.items()}

    def _leave_out(self, word: str, path: tuple[str, ...], why: str) -> None:
        self.left_out.append(f"`{word}` at {'.'.join(path) or 'the top'} {why}")

    def _is_refused(self, schema: Schema, words: Sequence[str]) -> bool:
        """Ask the grammar library about some words of a schema."""
        subset = {word: schema[word] for word in ("type", *words) if word in schema}
        if isinstance(named := subset.get("patternProperties"), dict):
            subset["patternProperties"] = dict.fromkeys(named, True)
        text = dumps({**subset, "x-guidance": {"lenient": False}}).decode()
        return bool(self._objection_to(f"start: %json {text}"))

    def _exclusive(self, branches: Sequence[Any]) -> bool:
        """Return whether no value can match two of the branches, in time that grows with their size."""
        groups: dict[frozenset[str], list[_Branch]] = {}
        for branch in branches:
            meant = _Branch(branch, self._resolver)
            groups.setdefault(meant.types, []).append(meant)
        kinds = list(groups)  # few: there are seven types
        return all(map(_all_differ, groups.values())) and all(
            not one & other or _all_differ([*groups[one], *groups[other]])
            for i, one in enumerate(kinds)
            for other in kinds[:i]
        )


class _Branch:
    """The marks that tell a branch of a oneOf from the others.

    Attributes:
        types: the allowed JSON types.
        values: the only values, by "", and those of members that are required, by their names.
    """

    def __init__(self, schema: Any, resolver: Resolver) -> None:
        found = resolver.ways(schema)
        self.types = frozenset[str]().union(*map(types_of, found))
        values = {"": _values(found)}
        if self.types == {"object"}:
            described = [members(way) for way in found]
            for name in required(found[0]).intersection(*map(required, found[1:])):
                inner = [way for known in described for way in resolver.ways(known.get(name, {}))]
                values[f".{name}"] = _values(inner)
        self.values = {name: some for name, some in values.items() if some is not None}


def _values(found: Sequence[Together]) -> set[Hashable] | None:
    """Return the only values that match in one of these ways, None if they are not listed."""
    values = [listed(way) for way in found]
    return None if None in values else {key_of(value) for some in values for value in some or ()}


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


def _names_types(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def _is_beyond(patterns: str | Mapping[str, Any]) -> bool:
    return any(map(_BEYOND_REGEX.search, [patterns] if isinstance(patterns, str) else patterns))


def _is_ordinary(limit: Any) -> bool:
    """Return whether a limit is certainly enforced: the grammar library need not be asked."""
    return type(limit) is int and 0 <= limit < _ORDINARY


def _ascii_classes(pattern: str) -> str:
    r"""Return the same expression with \d and \w written out."""
    return "".join(map(_ascii, _PIECES.findall(pattern)))


def _ascii(piece: str) -> str:
    if piece.startswith("["):
        return _ESCAPES.sub(lambda m: _CLASSES.get(m[0], m[0]), piece)
    if piece.startswith("\\") and piece.lower() in _CLASSES:
        return f"[{'^' if piece.isupper() else ''}{_CLASSES[piece.lower()]}]"
    return piece
