"""Grammars of arguments that are no JSON object: texts without quotes between tags, Gemma's, and LFM2's keywords.

They ask `schemas` what may stand in a place, as the parsers do: what the grammar takes for text is read as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..big_json import dumps
from ..call_marks import Ends
from ..errors import refusal
from ..schemas import (
    Resolver,
    Schema,
    Together,
    items_of,
    listed,
    members,
    required,
    types_of,
)
from .lark import Lark, escaped, terminal, without
from .patterns import limits

SCALARS = frozenset({"number", "integer", "boolean", "null"})
_PLAIN_KEY = re.compile(r"[^\s{}\[\]\",<:][^{}\",<:\n]*")
_FIELD = "tools"


@dataclass(frozen=True, slots=True)
class ForcedTool:
    """A tool that can be called.

    Attributes:
        schema: the enforceable part of its parameters' schema.
        strict: what can't be enforced is refused.
    """

    name: str
    schema: dict[str, Any]
    strict: bool


class Unquoted:
    """Rules of one tool's arguments.

    Args:
        ends: the marks that no text may hold, see `Lark.free_text`.
        kinds: what stands before a text, and before JSON.

    Raises:
        InvalidRequestError: by its methods: no arguments match the schema, or a limit can't be followed with `strict`.
    """

    def __init__(self, lark: Lark, tool: ForcedTool, ends: Ends | None = None, kinds: Sequence[str] = ()) -> None:
        self.lark = lark
        self._ends = ends or {}
        self._before_text, self._before_json = map(lark.literal, kinds or ("", ""))
        self._has_kinds = bool(kinds)
        self._tool = tool
        self._root = tool.schema
        self._resolver = Resolver(tool.schema)
        self._known: dict[Hashable, str] = {}  # rules of values by their schemas, which may contain themselves

    def tagged(self, begin: Callable[[str], str], end: str) -> str:
        """Return the rule of all arguments between tags, in the schema's order.

        Args:
            begin: returns the rule of what stands before the value of a name; `end` follows the value.
        """
        return self._choice("arguments", (self._pairs(way, begin, end) for way in self.objects(self._root)))

    def _pairs(self, way: Together, begin: Callable[[str], str], end: str) -> str:
        self._check_count(way, ())
        needed = required(way)
        pairs = [
            f"({begin(name)} {self._value(schema, end, (name,))}){'' if name in needed else '?'}"
            for name, schema in members(way).items()
        ]
        return self.lark.rule("pairs", " ".join(pairs) or '""')

    def objects(self, schema: Schema) -> list[Together]:
        """Return the ways to match a schema by an object whose required members may all be there."""
        found = [way for way in self._resolver.ways(schema) if "object" in types_of(way)]
        possible = [way for way in found if required(way) <= members(way).keys()]
        if not possible:
            raise refusal(_FIELD, f"{self._tool.name}: no arguments match the schema")
        return possible

    def _value(self, schema: Schema, end: str, path: tuple[str, ...]) -> str:
        """Return the rule of a value and the literal `end`: text as it is, every other type as JSON.

        Where no `kinds` tell, the parser takes for text whatever stands where free text may: other types are then
        not written, but null.
        """
        found = self._resolver.ways(schema)
        key = _key(found)
        if key not in self._known:
            self._known[key] = self._text_or_json(schema, found, end, path)
        return self._known[key]

    def _text_or_json(self, schema: Schema, found: Sequence[Together], end: str, path: tuple[str, ...]) -> str:
        texts = [way for way in found if "string" in types_of(way)]
        if not texts:
            return f"{self._before_json} {self._json(schema)} {self.lark.literal(end)}"
        rules = [f"{self._before_text} {self.text(way, end, path)}" for way in texts]
        known = self._resolver.place(schema)
        if known.texts is not None or self._has_kinds:
            rules += [
                f"{self._before_json} {rule} {self.lark.literal(end)}" for way in found for rule in self._untexted(way)
            ]
        elif "null" in known.types and not known.open:
            rules.append(f"{self._before_json} {self.lark.literal(f'null{end}')}")
        return self._choice("value", rules)

    def _untexted(self, way: Together) -> Sequence[str]:
        """Return the rule of those values that are no text, if there are some."""
        types = types_of(way) - {"string"}
        if not types:
            return ()
        if (values := listed(way)) is not None:
            others = [value for value in values if not isinstance(value, str)]
            return [self._json({"enum": others})] if others else ()
        return [self._json({"allOf": list(way), "type": sorted(types)})]

    def text(self, way: Together, end: str, path: tuple[str, ...]) -> str:
        """Return the rule of a text and the literal `end`: one of an enumeration, or free within its limits."""
        words = [limit for schema in way for limit in limits(schema)]
        values = self._listed(way, path)
        texts = [value for value in values or () if isinstance(value, str)]
        if values is not None and not words:
            return f"{self.lark.any_of(texts)} {self.lark.literal(end)}"
        patterns = [] if values is None else ["|".join(map(escaped, texts))]
        for word, pattern in words:
            together = " & ".join(map(terminal, [*patterns, pattern or "", without(*self._ends)]))
            if pattern is None or self.lark.objection(f"start: TEXT\nTEXT: {together}"):
                self._ignore(word, path)
            else:
                patterns.append(pattern)
        return self.lark.free_text(end, self._ends, patterns)

    def _listed(self, way: Together, path: tuple[str, ...]) -> list[Any] | None:
        """Return the only values that are allowed; None if they are not listed, or can't be since one holds a mark."""
        values = listed(way)
        written = dumps(values)
        if any(dumps(mark.strip())[1:-1] in written for mark in self._ends):
            self._ignore("const" if any("const" in schema for schema in way) else "enum", path)
            return None
        return values

    def listed_pairs(self, way: Together, separator: str, pair: Callable[[str, Schema], str]) -> str:
        """Return the rule of required members, then optional ones, with separators between, from that of each."""
        between, needed, rules = self.lark.literal(separator), required(way), (list[str](), list[str]())
        for name, schema in members(way).items():
            rules[name in needed].append(pair(name, schema))
        if rules[True]:
            return " ".join([f" {between} ".join(rules[True]), *(f"({between} {rule})?" for rule in rules[False])])
        return f"{self._some_of(rules[False], between)}?" if rules[False] else '""'

    def _some_of(self, pairs: Sequence[str], between: str) -> str:
        """Return the rule of one or more of the pairs, in their order. Halves keep it flat."""
        if len(pairs) == 1:
            return pairs[0]
        middle = len(pairs) // 2
        first, second = self._some_of(pairs[:middle], between), self._some_of(pairs[middle:], between)
        return self.lark.rule("some", f"{first} ({between} {second})? | {second}")

    def _check_count(self, way: Together, path: tuple[str, ...]) -> None:
        least = max((schema.get("minProperties", 0) for schema in way), default=0)
        if least > len(required(way)):
            self._ignore("minProperties", path)

    def _ignore(self, word: str, path: tuple[str, ...]) -> None:
        where = ".".join(path) or "the top"
        sentence = f"{_FIELD}: {self._tool.name}: `{word}` at {where} can't be enforced in this model's notation"
        self.lark.ignore(sentence, self._tool.strict, _FIELD)

    def _json(self, schema: Schema) -> str:
        definitions = self._root.get("$defs")
        return self.lark.enforced_json({**schema, "$defs": definitions} if definitions else schema)

    def _choice(self, kind: str, rules: Iterable[str]) -> str:
        return self.lark.rule(kind, " | ".join(dict.fromkeys(rules)))


class Keywords(Unquoted):
    """Rules of arguments as in Python, with JSON behind each name: x=1, y="text"."""

    def arguments(self) -> str:
        """Return the rule of all arguments."""
        return self._choice("arguments", map(self._keywords, self.objects(self._root)))

    def _keywords(self, way: Together) -> str:
        self._check_count(way, ())
        return self.listed_pairs(way, ", ", lambda name, one: f"{self.lark.literal(f'{name}=')} {self._json(one)}")


class Gemma(Unquoted):
    """Rules of Gemma's notation: {x:1,y:<|"|>text<|"|>,z:[true]}.

    Args:
        quote: the mark before and behind a text.
    """

    def __init__(self, lark: Lark, tool: ForcedTool, quote: str) -> None:
        super().__init__(lark, tool, {quote: ()})
        self._quote = quote
        self._todo: list[tuple[str, list[Together], tuple[str, ...]]] = []  # rules that have a name, and no body yet

    def arguments(self) -> str:
        """Return the rule of all arguments."""
        arguments = self._choice("arguments", [self._object(way, ()) for way in self.objects(self._root)])
        while self._todo:
            self._define(*self._todo.pop())
        return arguments

    def _object(self, way: Together, path: tuple[str, ...]) -> str:
        """Return the rule of an object: required members, then optional ones, in the schema's order."""
        self._check_count(way, path)
        if not members(way):
            return self._map(way, path)
        pairs = self.listed_pairs(way, ",", lambda key, one: f"{self._key(key)} {self._any_value(one, (*path, key))}")
        return self.lark.rule("object", f'"{{" {pairs} "}}"')

    def _key(self, name: str) -> str:
        plain = _PLAIN_KEY.fullmatch(name)
        return self.lark.literal(f"{name}:" if plain else f"{self._quote}{name}{self._quote}:")

    def _map(self, way: Together, path: tuple[str, ...]) -> str:
        """Return the rule of an object without described members."""
        others = [schema.get("additionalProperties", {}) for schema in way]
        if False in others or any("properties" in schema for schema in way) or not (path or any(others)):
            return '"{" "}"'
        schema = {"allOf": [other for other in others if isinstance(other, dict)]}
        return self.lark.rule("map", self._members(self._any_value(schema, (*path, "*"))))

    def _members(self, value: str) -> str:
        key = self.lark.define("KEY", r"/[\w-]+/")
        return f'"{{" ({key} ":" {value} ("," {key} ":" {value})*)? "}}"'

    def _any_value(self, schema: Schema, path: tuple[str, ...]) -> str:
        """Return the rule of a value of any of the types that may stand in its place."""
        found = self._resolver.ways(schema)
        key = _key(found)
        if key not in self._known:
            self._known[key] = self.lark.define(self.lark.unused("value"), '""')
            self._todo.append((self._known[key], found, path))
        return self._known[key]

    def _define(self, name: str, found: Sequence[Together], path: tuple[str, ...]) -> None:
        rules = dict.fromkeys(rule for way in found for rule in self._typed(way, path))
        if not rules:
            raise refusal(_FIELD, f"{self._tool.name}: no value matches the schema at {'.'.join(path)}")
        self.lark.define(name, " | ".join(rules))

    def _typed(self, way: Together, path: tuple[str, ...]) -> Sequence[str]:
        if not way:
            return [self._anything()]
        types, values, rules = types_of(way), self._listed(way, path), list[str]()
        if values is not None:
            rules = [self._literal(value) for value in values if not isinstance(value, str)]
        if "string" in types:
            rules.append(f"{self.lark.literal(self._quote)} {self.text(way, self._quote, path)}")
        if values is not None:
            return rules
        if "object" in types:
            rules.append(self._object(way, path))
        if "array" in types:
            rules.append(self._array(way, path))
        if scalars := types & SCALARS:
            rules.append(self._json({"allOf": list(way), "type": sorted(scalars)}))
        return rules

    def _literal(self, value: Any) -> str:
        """Return exactly this value."""
        match value:
            case str():
                return self.lark.literal(f"{self._quote}{value}{self._quote}")
            case dict():
                pairs = [f"{self._key(name)} {self._literal(inner)}" for name, inner in value.items()]
                return f'"{{" {self._joined(pairs)} "}}"'
            case list():
                return f'"[" {self._joined([self._literal(inner) for inner in value])} "]"'
        return self.lark.literal(dumps(value).decode())

    def _joined(self, rules: Sequence[str]) -> str:
        return ' "," '.join(rules) or '""'

    def _array(self, way: Together, path: tuple[str, ...]) -> str:
        """Return the rule of an array: the items of a tuple, then further ones, as many as there may be."""
        first, rest = self._items(way, path)
        least, most = self._counts(way)
        if most == 0:
            return '"[" "]"'
        ahead = max(len(first), 1)
        more = f'("," {rest}){{{max(least - ahead, 0)},{"" if most is None else most - ahead}}}'
        if rest == "" or (most is not None and most <= len(first)):
            more = ""
        first = first[:most] or [rest]
        body = more
        for i, item in reversed(list(enumerate(first))):
            body = f"{item} {body}" if i == 0 else f'"," {item} {body}'
            body = body if i < least else f"({body})?"
        return self.lark.rule("array", f'"[" {body} "]"')

    def _items(self, way: Together, path: tuple[str, ...]) -> tuple[list[str], str]:
        """Return the rules of a tuple's items, in either spelling of JSON Schema, and that of any further item."""
        tuples = [items_of(schema.get("prefixItems")) or items_of(schema.get("items")) for schema in way]
        longest = max(tuples, key=len, default=list[Any]())
        first = [self._any_value(item, (*path, str(i))) for i, item in enumerate(longest)]
        others = [inner for schema in way if isinstance(inner := schema.get("items"), dict)]
        return first, "" if first and not others else self._any_value({"allOf": others}, (*path, "*"))

    def _counts(self, way: Together) -> tuple[int, int | None]:
        least = [count for schema in way if type(count := schema.get("minItems")) is int]
        most = [count for schema in way if type(count := schema.get("maxItems")) is int]
        return max(least, default=0), min(most, default=None)

    def _anything(self) -> str:
        text = f"{self.lark.literal(self._quote)} {self.lark.free_text(self._quote)}"
        scalar = self.lark.enforced_json({"type": sorted(SCALARS)})
        return self.lark.define("any", f'{text} | {scalar} | "[" (any ("," any)*)? "]" | {self._members("any")}')


def _key(found: Sequence[Together]) -> Hashable:
    return tuple(tuple(map(id, way)) for way in found)
