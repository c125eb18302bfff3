"""Schemas of tools as pydantic, zod-to-json-schema and the agents themselves write them."""

from __future__ import annotations

from datetime import date, datetime
from enum import Enum, IntEnum, StrEnum
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AnyUrl, BaseModel, ConfigDict, Field, RootModel, create_model

STRING, INTEGER, NUMBER, BOOLEAN = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
NULL = {"type": "null"}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


class Color(StrEnum):
    red = "red"
    green = "green"


class Only(Enum):
    one = "one"


class Mixed(Enum):
    word = "1"
    number = 2
    nothing = None


class Level(IntEnum):
    low = 1
    high = 2


class Point(BaseModel):
    x: int
    y: int = 0


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1, max_length=8)


class Tree(BaseModel):
    name: Literal["leaf", "node"]
    children: list[Tree] = Field(default=[], max_length=2)


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool


class Points(RootModel[list[Point]]):
    pass


# Each is the type of one argument, which is required, and again optional.
PYDANTIC: list[Any] = [
    str,
    int,
    float,
    bool,
    Color,
    Level,
    Only,
    Mixed,
    str | None,
    int | None,
    bool | None,
    Color | None,
    Level | None,
    Point | None,
    int | Color,
    int | str,
    Point | str,
    Color | Level | None,
    Point,
    Strict,
    Tree,
    Points,
    list[Color],
    list[Point],
    tuple[int, Color],
    dict[str, int],
    set[Level],
    Literal["a", "b"],
    Literal["a", 1, True, None],
    Annotated[str, Field(pattern=r"^[a-z]{2,4}$")],
    Annotated[str, Field(pattern=r"^\d{3}-\d{4}$|^none$")],
    Annotated[str, Field(min_length=3, max_length=5)],
    Annotated[str | None, Field(max_length=4)],
    Annotated[int, Field(ge=0, le=100)],
    Annotated[int, Field(gt=-(2**63), lt=2**63)],
    Annotated[float, Field(ge=0, lt=1)],
    Annotated[list[int], Field(min_length=1, max_length=3)],
    Annotated[Cat | Dog, Field(discriminator="kind")],
    date,
    datetime,
    UUID,
    AnyUrl,
]


def zod(properties: dict[str, Any], *needed: str, **more: Any) -> dict[str, Any]:
    """An object as zod-to-json-schema writes it."""
    required = {"required": list(needed)} if needed else {}
    return {
        "type": "object",
        "properties": properties,
        **required,
        "additionalProperties": False,
        "$schema": DRAFT_7,
    } | more


CREATE = {"type": "object", "properties": {"op": {"type": "string", "const": "create"}, "size": INTEGER},
          "required": ["op", "size"], "additionalProperties": False}  # fmt: skip
DROP = {"type": "object", "properties": {"op": {"type": "string", "const": "drop"}}, "required": ["op"],
        "additionalProperties": False}  # fmt: skip
USER = {"type": "object", "properties": {"id": {"type": "integer", "exclusiveMinimum": 0, "maximum": 99}},
        "required": ["id"], "additionalProperties": False}  # fmt: skip
ZOD: list[dict[str, Any]] = [
    zod({"path": STRING}, "path"),
    zod({"path": {"type": "string", "minLength": 1}, "limit": {"type": "integer", "minimum": 1, "maximum": 9}}, "path"),
    zod({"mode": {"type": "string", "enum": ["r", "w"]}, "n": {"type": ["string", "null"]}}, "mode", "n"),
    zod({"level": {"type": "number", "enum": [1, 2]}}, "level"),
    zod({"value": {"type": ["string", "number", "boolean"]}}, "value"),
    zod({"value": {"anyOf": [CREATE, DROP]}}, "value"),
    zod({"value": {"anyOf": [USER, NULL]}}, "value"),
    zod({"first": USER, "second": {"$ref": "#/properties/first"}}, "first", "second"),
    zod({"pair": {"type": "array", "minItems": 2, "maxItems": 2, "items": [INTEGER, {"const": "x"}]}}, "pair"),
    zod({"tags": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}, "maxItems": 2}}, "tags"),
    zod({"map": {"type": "object", "additionalProperties": BOOLEAN}}, "map"),
    zod({"id": {"type": "string", "format": "uuid"}, "mail": {"type": "string", "format": "email"}}, "id", "mail"),
    zod({"code": {"type": "string", "pattern": "^[A-Z]{3}$"}}, "code"),
    zod({"code": {"allOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 3}]}}, "code"),
    {"anyOf": [CREATE, DROP], "$schema": DRAFT_7},
    {"allOf": [{"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
               {"type": "object", "properties": {"b": {"enum": ["x"]}}, "required": ["b"]}], "$schema": DRAFT_7},
    {"$ref": "#/definitions/Args", "definitions": {"Args": zod({"u": USER}, "u")}, "$schema": DRAFT_7},
]  # fmt: skip
AGENTS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"command": STRING, "timeout": {"type": "number", "maximum": 600}},
     "required": ["command"]},
    {"type": "object", "properties": {"todos": {"type": "array", "items": {"type": "object", "properties": {
        "content": {"type": "string", "minLength": 1}, "status": {"type": "string", "enum": ["pending", "done"]}},
        "required": ["content", "status"], "additionalProperties": False}, "maxItems": 2}}, "required": ["todos"]},
    {"type": "object", "properties": {"page[size]": {"type": "integer", "maximum": 9}, "filter[name]": STRING},
     "required": ["page[size]", "filter[name]"]},
    {"type": "object", "properties": {"edits": {"type": "array", "minItems": 1, "maxItems": 2, "items": {
        "type": "object", "properties": {"old": STRING, "new": STRING, "all": {"type": "boolean", "default": False}},
        "required": ["old", "new"], "additionalProperties": False}}}, "required": ["edits"]},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "object", "properties": {"input": {}}, "required": ["input"]},
    {"properties": {"url": {"type": "string", "format": "uri"}, "count": {"type": "integer", "format": "int32"}},
     "required": ["url", "count"], "type": "object"},
    {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}},
     "anyOf": [{"required": ["a"]}, {"required": ["b"]}], "additionalProperties": False},
    {"type": "object", "properties": {"kind": {"oneOf": [{"const": "a"}, {"const": "b"}]},
     "n": {"oneOf": [INTEGER, NULL]}}, "required": ["kind", "n"]},
    {"type": ["object", "null"], "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {"c": BOOLEAN}, "required": ["c"],
     "anyOf": [{"properties": {"a": INTEGER}, "required": ["a"]}, {"properties": {"b": STRING}, "required": ["b"]}]},
    {"allOf": [{"anyOf": [CREATE, DROP]}]},
]  # fmt: skip


def _arguments(kind: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"value": (kind, ...), "other": (kind | None, None)}
    schema: dict[str, Any] = create_model("Arguments", **fields).model_json_schema()
    return schema


def schemas() -> list[dict[str, Any]]:
    """The parameters of the tools."""
    return [*map(_arguments, PYDANTIC), *ZOD, *AGENTS]
