"""JSON schemas with `$ref` followed: what may stand in a place of a call's arguments.

Clients write the schemas: whatever in them is no schema allows anything.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any]
# Schemas without composition that all hold at once.
Together = tuple[Schema, ...]

TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
ALIKE: Mapping[str, frozenset[str]] = {"number": frozenset({"number", "integer"})}
# Python's words for types, which some clients write
WORDS = {"str": "string", "float": "number", "int": "integer", "bool": "boolean", "list": "array", "dict": "object"}
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
# words that describe one type only; a schema that has them and names no type means this one
IMPLIED = {"properties": "object", "items": "array", "prefixItems": "array"}
# words that say nothing themselves
COMPOSING = frozenset("$ref allOf anyOf oneOf $defs definitions $id $schema title description default".split())
DEEPEST = 64  # hops and compositions
MOST_WAYS = 256  # compositions with more ways to match, or more parts, say nothing here


def mapping_of(value: Any) -> dict[str, Any]:
    """Return an object of a schema, an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def items_of(value: Any) -> list[Any]:
    """Return an array of a schema, an empty one for anything else."""
    return value if isinstance(value, list) else []


def reference_in(reference: str, root: Any) -> str:
    """Return a reference as a path from the root, "" if it is none."""
    identity = root.get("$id") if isinstance(root, dict) else None
    if isinstance(identity, str) and not reference.startswith("#"):
        reference = "#" + reference.removeprefix(identity).removeprefix("#")
    return reference if reference[:2] in ("#", "#/") else ""


def target(reference: str, root: Any) -> Any:
    """Return the schema that a local reference names, None if there is none. Source: RFC 6901."""
    path = reference_in(reference, root)
    if not path:
        return None
    for step in unquote(path).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isdecimal() and len(name) < 10 and int(name) < len(root):
            root = root[int(name)]
        else:
            root = root.get(name) if isinstance(root, dict) else None
    return root


@dataclass(frozen=True, slots=True)
class Place:
    """The values that may stand in one place.

    Attributes:
        types: the JSON types; all of them where the schema names none.
        texts: the only strings, None for any.
    """

    types: frozenset[str] = TYPES
    texts: frozenset[str] | None = None

    @property
    def open(self) -> bool:
        """True where nothing is known about the type."""
        return self.types == TYPES and self.texts is None


class Resolver:
    """The values that one schema allows in each of its places: references, anyOf, oneOf and allOf are resolved.

    Args:
        root: the schema that references point into. Each of them is resolved once: they may fan out without end.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[str, list[Together]] = {}  # by reference

    def ways(self, schema: Any) -> list[Together]:
        """Return the ways in which a value can match a schema within the root."""
        return [way for way in self._ways(schema, 0) if types_of(way)]

    def place(self, schema: Any) -> Place:
        """Return what a schema within the root allows in its place."""
        found = self.ways(schema)
        types = frozenset[str]().union(*map(types_of, found)) if found else TYPES
        lists = [listed(way) for way in found if "string" in types_of(way)]
        if not lists or any(values is None for values in lists):
            return Place(types)
        return Place(types, frozenset(text for values in lists for text in values or () if isinstance(text, str)))

    def _ways(self, schema: Any, depth: int) -> list[Together]:
        if schema is False:
            return []
        if not isinstance(schema, dict) or depth > DEEPEST:
            return [()]
        own: list[Together] = [() if schema.keys() <= COMPOSING else (schema,)]
        found = own
        for others in self._compositions(schema, depth + 1):
            if len(found) * len(others) > MOST_WAYS:
                return own
            found = [way + other for way in found for other in others]
        return [*found, ({"type": "null"},)] if schema.get("nullable") is True else found  # OpenAPI 3.0

    def _compositions(self, schema: Schema, depth: int) -> Iterable[list[Together]]:
        """Return groups of ways; one of each group has to hold."""
        if isinstance(reference := schema.get("$ref"), str):
            yield self._referred(reference, depth)
        for part in items_of(schema.get("allOf"))[:MOST_WAYS]:
            yield self._ways(part, depth)
        for word in ("anyOf", "oneOf"):
            if branches := items_of(schema.get(word)):
                yield [way for branch in branches for way in self._ways(branch, depth)]

    def _referred(self, reference: str, depth: int) -> list[Together]:
        if reference not in self._known:
            self._known[reference] = [()]  # a circle says nothing
            self._known[reference] = self._ways(target(reference, self._root), depth)
        return self._known[reference]


def types_of(way: Together) -> frozenset[str]:
    """Return the JSON types that are allowed at once. A number may be an integer."""
    return TYPES.intersection(*map(_types, way))


def _types(schema: Schema) -> frozenset[str]:
    stated = schema.get("type")
    names = {WORDS.get(name, name) for name in [stated, *items_of(stated)] if isinstance(name, str)} & TYPES
    allowed = _with_alike(names) if names else TYPES
    if (listed := _listed(schema)) is not None:
        return allowed & _with_alike(map(kind_of, listed))
    return allowed if stated is not None else _implied(schema)


def _with_alike(kinds: Iterable[str]) -> frozenset[str]:
    return frozenset().union(*(ALIKE.get(kind, {kind}) for kind in set(kinds)))


def _implied(schema: Schema) -> frozenset[str]:
    return next((frozenset({kind}) for word, kind in IMPLIED.items() if word in schema), TYPES)


def kind_of(value: Any) -> str:
    """Return the JSON type of a value."""
    return KINDS.get(type(value), "null")


def _listed(schema: Schema) -> list[Any] | None:
    """Return the only values that match a schema without composition, None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def listed(way: Together) -> list[Any] | None:
    """Return the only values that are allowed, None if they are not listed."""
    lists = [values for schema in way if (values := _listed(schema)) is not None]
    if not lists:
        return None
    types = types_of(way)
    others = [set(map(key_of, values)) for values in lists[1:]]
    return [v for v in lists[0] if kind_of(v) in types and all(key_of(v) in known for known in others)]


def key_of(value: Any) -> Hashable:
    """Return a key that is the same for equal JSON values."""
    if isinstance(value, dict):
        return frozenset((name, key_of(inner)) for name, inner in value.items())
    return tuple(map(key_of, value)) if isinstance(value, list) else (type(value) is bool, value)


def members(way: Together) -> dict[str, Schema]:
    """Return the schemas of an object's members by name: of those that are described or required."""
    parts: dict[str, list[Any]] = {}
    for schema in way:
        for name, inner in mapping_of(schema.get("properties")).items():
            parts.setdefault(name, []).append(inner)
    others = [inner for schema in way if isinstance(inner := schema.get("additionalProperties"), dict)]
    parts |= dict.fromkeys(sorted(required(way) - parts.keys()), others)
    return {name: mapping_of(inner[0]) if len(inner) == 1 else {"allOf": inner} for name, inner in parts.items()}


def required(way: Together) -> set[str]:
    """Return the names of an object's required members."""
    return {name for schema in way for name in items_of(schema.get("required")) if isinstance(name, str)}


class Places(Mapping[str, Place]):
    """The values that may stand in each member of a tool's arguments, by name; looked up when it is asked for."""

    def __init__(self, parameters: Any) -> None:
        self._resolver = Resolver(parameters)
        self._schemas: dict[str, list[Schema]] = {}
        for way in self._resolver.ways(parameters):
            for name, schema in members(way).items():
                self._schemas.setdefault(name, []).append(schema)

    def __getitem__(self, name: str) -> Place:
        return self._resolver.place({"anyOf": self._schemas[name]})

    def __iter__(self) -> Iterator[str]:
        return iter(self._schemas)

    def __len__(self) -> int:
        return len(self._schemas)
