"""The part of a JSON schema that a grammar can enforce. The grammar library says what it does not follow."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

from mlx_specprefill import grammar_warnings

from ..big_json import dumps
from ..schemas import TYPES, Resolver, key_of, listed, members, reference_in, required, target, types_of

Schema = dict[str, Any]
Path = tuple[str, ...]

# At most one space, where people write one. A model could fill its whole answer with free whitespace.
COMPACT = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": True,  # what is not followed is named
}
# They tell people something, or name documents, to which references are written as paths. `nullable` is no JSON schema:
# null would not be valid.
_SILENT = frozenset("$id $schema $dynamicAnchor $recursiveAnchor nullable "
                    "title description default examples $comment x-guidance".split())  # fmt: skip
_HARMLESS: Mapping[str, tuple[Any, ...]] = {"uniqueItems": (False,), "unevaluatedItems": (True,),
                                            "unevaluatedProperties": (True,), "propertyNames": ({}, True)}  # fmt: skip
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # schemas by name
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_STRUCTURE = frozenset({*_NAMED, *_LISTED, *_SINGLE, "required"}) - {"patternProperties"}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LARGEST_STEP = 4096  # a grammar of larger multiples within bounds has too many states
_MOST_CHECKED = 256  # parts of a schema that are checked one by one; each takes milliseconds
_PIECES = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]?|.", re.DOTALL)
_ESCAPES = re.compile(r"\\.", re.DOTALL)
_CLASSES = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}  # ASCII in JSON schemas (ECMA-262), Unicode in the grammar library


class EnforceableSchema:
    """The part of a schema that can be enforced.

    Args:
        strict: nothing is removed that the grammar library can't read.

    Attributes:
        schema: the schema without words that say nothing, and without what would have it refused. A oneOf becomes an
            anyOf, which is the same for exclusive branches.
        left_out: a sentence for each part that is not enforced.

    Raises:
        ValueError: no value can follow it, or `strict`, and the grammar library can't read it; the text says why.
    """

    def __init__(self, schema: Mapping[str, Any], strict: bool = False) -> None:
        self._root = schema
        self._resolver = Resolver(schema)
        self._checked = 0
        self.left_out: list[str] = []
        self.schema: Schema = self._each(schema, self._plain, ())
        try:
            told = _warnings(self.schema)
        except ValueError:
            if strict:
                raise
            self.schema = self._each(self.schema, self._mended, ())
            told = _warnings(self.schema)
        self.left_out += told

    def _each(self, schema: Any, change: Callable[[Schema, Path], Schema], path: Path) -> Any:
        """Return the schema with a change of it and of each schema in it."""
        if not isinstance(schema, dict):
            return schema
        out = change(schema, path)
        for word, value in out.items():
            if word in _NAMED and isinstance(value, dict):
                out[word] = {name: self._each(inner, change, (*path, word, name)) for name, inner in value.items()}
            elif word in _LISTED and isinstance(value, list):
                out[word] = [self._each(inner, change, (*path, word, str(i))) for i, inner in enumerate(value)]
            elif word in _SINGLE:
                out[word] = self._each(value, change, (*path, word))
        return out

    def _plain(self, schema: Schema, path: Path) -> Schema:
        """Return the schema in words that the grammar library knows."""
        out = {word: value for word, value in schema.items() if word not in _SILENT and not _is_harmless(word, value)}
        if isinstance(pattern := out.get("pattern"), str):
            out["pattern"] = _ascii_classes(pattern)
        if isinstance(reference := out.get("$ref"), str) and (found := reference_in(reference, self._root)):
            out["$ref"] = "#" + quote(unquote(found[1:]), safe="/~$")
        step = out.get("multipleOf")
        if isinstance(step, int | float) and step > _LARGEST_STEP:
            why = f"is not supported beside a `multipleOf` over {_LARGEST_STEP}"
            for word in [word for word in _BOUNDS if word in out]:
                self._remove(word, out, path, why)
        branches = out.get("oneOf")
        if isinstance(branches, list) and branches and "anyOf" not in out:
            if not self._are_exclusive(branches):
                self._leave_out("oneOf", path, "is taken as anyOf: its branches may hold together")
            out = {"anyOf" if word == "oneOf" else word: value for word, value in out.items()}
        return out

    def _mended(self, schema: Schema, path: Path) -> Schema:
        """Return the schema without words that the grammar library refuses, alone or together."""
        out = dict(schema)
        words = sorted(
            (word for word in out if word not in _STRUCTURE), key="type".__ne__
        )  # the type, which tells of what others speak, first
        for word in words:
            if why := self._objection(out, [word]):
                self._remove(word, out, path, f"is not supported: {why}")
        words = [word for word in words if word in out and word not in ("type", "$ref")]
        while words and self._objection(out, words):
            self._remove(words.pop(0), out, path, "can't be enforced beside the other limits")
        return out

    def _objection(self, schema: Schema, words: Sequence[str]) -> str:
        """Return what the grammar library has against some words of a schema, "" for nothing."""
        subset = {word: schema[word] for word in ("type", *words) if word in schema}
        if isinstance(reference := subset.pop("$ref", None), str):
            return "" if target(reference, self._root) is not None else f"{reference!r:.60} is not in it"
        if isinstance(named := subset.get("patternProperties"), dict):
            subset["patternProperties"] = dict.fromkeys(named, True)
        self._checked += 1
        try:
            if self._checked <= _MOST_CHECKED:
                _warnings(subset)
        except ValueError as error:
            return str(error).rpartition("error: ")[2]
        return ""

    def _remove(self, word: str, schema: Schema, path: Path, why: str) -> None:
        del schema[word]
        self._leave_out(word, path, why)

    def _leave_out(self, word: str, path: Path, why: str) -> None:
        self.left_out.append(f"`{word}` at {'.'.join(path) or 'the top'} {why}")

    def _are_exclusive(self, branches: Sequence[Any]) -> bool:
        """Return whether no value can match two of the branches: those with a type in common list values of their own,
        or list them for a member that all require.
        """
        known = [self._marks(branch) for branch in branches]
        return all(_differ([values for types, values in known if one in types]) for one in TYPES)

    def _marks(self, branch: Any) -> tuple[frozenset[str], dict[str, set[Hashable]]]:
        """Return the types that a branch allows, and the only values, by "", and those of required members."""
        found = self._resolver.ways(branch)
        places = {"": found}
        for name in required(found[0]).intersection(*map(required, found[1:])) if found else ():
            places[f".{name}"] = [w for way in found for w in self._resolver.ways(members(way).get(name, {}))]
        values = {name: [listed(way) for way in ways] for name, ways in places.items()}
        sets = {name: {key_of(v) for some in lists for v in some or ()} for name, lists in values.items()
                if None not in lists}  # fmt: skip
        return frozenset[str]().union(*map(types_of, found)), sets


def _differ(branches: Sequence[Mapping[str, set[Hashable]]]) -> bool:
    """Return whether there is one branch at most, or all list values in one place, and no value twice."""
    names = [name for name in branches[0] if all(name in values for values in branches)] if branches else []
    sets = [[values[name] for values in branches] for name in names]
    return len(branches) < 2 or any(len(set[Hashable]().union(*some)) == sum(map(len, some)) for some in sets)


def _warnings(schema: Schema) -> list[str]:
    return grammar_warnings(f"start: %json {dumps({**schema, 'x-guidance': COMPACT}).decode()}")


def _is_harmless(word: str, value: Any) -> bool:
    return any(value == harmless and type(value) is type(harmless) for harmless in _HARMLESS.get(word, ()))


def _ascii_classes(pattern: str) -> str:
    r"""Return the same expression with \d and \w written out."""
    return "".join(map(_ascii, _PIECES.findall(pattern)))


def _ascii(piece: str) -> str:
    if piece.startswith("["):
        return _ESCAPES.sub(lambda m: _CLASSES.get(m[0], m[0]), piece)
    if piece.startswith("\\") and piece.lower() in _CLASSES:
        return f"[{'^' if piece.isupper() else ''}{_CLASSES[piece.lower()]}]"
    return piece
