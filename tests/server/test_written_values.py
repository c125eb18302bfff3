"""Whatever value a model writes arrives as it is, in every notation, by its own will or forced, however it is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from mlx_specprefill import InvalidRequestError
from mlx_specprefill_server.constrained.answer_grammar import constraint_of

from .notations import FORCED, NOTATIONS, Notation, as_json, exactly, in_all
from .parsers.reading import collected
from .test_output_format import SPECIAL, verdict

TEXT, ANY_TEXT = {"type": "string"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}
COLOR = {"$ref": "#/$defs/Color"}
DEFINITIONS = {
    "Color": {"type": "string", "enum": ["red", "green"]},
    "Level": {"type": "integer", "enum": [1, 2]},
    "Hop": {"$ref": "#/$defs/Level"},
    "Sub": {"type": "object", "properties": {"n": {"type": "integer"}}},
    "List[int]": {"type": "array", "items": {"type": "integer"}},
}
# schema and value, as JSON
VALUES: list[tuple[Any, str]] = [
    (TEXT, '"x = 1"'),
    (TEXT, '""'),
    (TEXT, '"null"'),
    (TEXT, '"true"'),
    (TEXT, '"42"'),
    (TEXT, '"{\\"a\\": 1}"'),
    (TEXT, '"    return 1"'),
    (TEXT, '"def f():\\n    return 1\\n"'),
    (TEXT, '"\\nfirst"'),
    (TEXT, '"   "'),
    (TEXT, '"</b> </"'),
    ({"type": "string", "pattern": "</b>"}, '"</b> </"'),
    (TEXT, '"\\tx"'),
    (TEXT, '"say \\"so\\" and \'so\'"'),
    (TEXT, '"a\\\\b \\\\n \\\\u0041"'),
    (TEXT, '"caf\u00e9 \U0001f600 \u2028"'),
    (TEXT, '"see </parameter> here\\nand more\\n"'),
    (TEXT, '"a </invoke> b </function> c </tool_call> d"'),
    (TEXT, '"a <parameter name=\\"b\\"> c, <arg_key>d</arg_key>"'),
    (ANY_TEXT, "null"),
    (ANY_TEXT, '"x"'),
    ({"type": ["string", "null"]}, "null"),
    ({"type": "integer"}, "0"),
    ({"type": "integer"}, "-9223372036854775809"),
    ({"type": "integer"}, "18446744073709551616"),
    ({"type": "array", "items": {"type": "integer"}}, "[18446744073709551617, -1]"),
    ({"type": "number"}, "1e309"),
    ({"type": "number"}, "-0.10"),
    ({"type": "number"}, "3.141592653589793238462643"),
    ({"type": "boolean"}, "true"),
    ({"type": "null"}, "null"),
    ({"type": "array"}, "[" * 300 + "]" * 300),
    ({"type": "array"}, "[]"),
    ({"type": "object"}, "{}"),
    ({"type": "object"}, '{"a": [1, {"b": "c"}], "d": null}'),
    (COLOR, '"green"'),
    ({"anyOf": [COLOR, {"type": "null"}]}, "null"),
    ({"anyOf": [COLOR, {"type": "null"}]}, '"red"'),
    ({"allOf": [{"$ref": "#/$defs/Level"}]}, "2"),
    ({"$ref": "#/$defs/Hop"}, "1"),
    ({"anyOf": [{"$ref": "#/$defs/Sub"}, {"type": "null"}]}, '{"n": 5}'),
    ({"anyOf": [{"$ref": "#/$defs/Sub"}, {"type": "null"}]}, "null"),
    ({"anyOf": [{"type": "integer"}, {"$ref": "#/properties/v/anyOf/" + "9" * 5000}]}, "7"),
    ({"anyOf": [{"type": "integer"}, COLOR]}, '"red"'),
    ({"oneOf": [{"const": "a"}, {"const": "b"}]}, '"b"'),
    ({"enum": ["a", 5, None]}, "5"),
    ({"$ref": "#/$defs/List[int]"}, "[1, 2]"),
    ({"type": "string", "pattern": "^[a-z]+-[0-9]{2}$", "maxLength": 9}, '"abc-12"'),
    ({"type": "string", "format": "uuid"}, '"6f9619ff-8b86-4011-b42d-00c04fc964ff"'),
    ({"type": "string", "format": "date-time"}, '"2026-11-26T18:00:00Z"'),
    ({"type": "string", "format": "date"}, '"2026-01-31"'),
    ({"type": "string", "format": "date"}, '"2026-04-30"'),
    ({"enum": ["a/b\nc", "d"], "minLength": 2}, '"a/b\\nc"'),
    ({"enum": ["on", "off", True]}, "true"),
    ({"type": "integer"}, "1" + "0" * 400),
    ({"type": "integer"}, "-" + "7" * 5000),
    ({"const": "null"}, '"null"'),
    (TEXT, '"x)], g(y=\'2\')"'),
    ({"type": "object"}, '{"a": "</parameter><parameter=b> </arg_value></tool_call>\\n</parameter>\\n"}'),
]  # fmt: skip


def tools(schema: Any) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"v": schema}, "required": ["v"], "$defs": DEFINITIONS}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def arguments(notation: Notation, text: str, schema: Any, cuts: list[int]) -> list[Any]:
    parser = notation.format.parser(tools(schema), "")
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    out = collected([delta for piece in pieces for delta in parser.push(piece)] + parser.finish(True))
    assert (out.text, out.broken) == ("", [])
    return [exactly(written) for _, written in out.calls]


@pytest.mark.parametrize(("case", "name"), in_all(len(VALUES), list(NOTATIONS), pytest.mark.extended))
def test_a_value_arrives_as_it_was_written(case: int, name: str) -> None:
    schema, written = VALUES[case]
    notation, value = NOTATIONS[name], exactly(written)
    text = notation.write({"v": value})
    rng = random.Random(written)
    cut = sorted(rng.sample(range(1, len(text)), 5))
    for cuts in ([], list(range(1, len(text))), cut):
        assert arguments(notation, text, schema, cuts) == [{"v": value}]


@pytest.mark.parametrize(("case", "name"), in_all(len(VALUES), FORCED, pytest.mark.extended))
def test_a_value_can_be_written_where_the_call_is_forced(case: int, name: str) -> None:
    schema, written = VALUES[case]
    notation = NOTATIONS[name]
    constraint = constraint_of(None, tools(schema), "required", notation.format.tools, special=SPECIAL)
    assert verdict(constraint, notation.forced({"v": exactly(written)})) == "whole"


@pytest.mark.parametrize("name", NOTATIONS)
def test_a_required_member_that_no_property_describes_has_the_type_of_additional_ones(name: str) -> None:
    parameters = {"type": "object", "required": ["v"], "additionalProperties": {"type": "integer"}}
    made = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    parser = NOTATIONS[name].format.parser(made, "")
    out = collected([*parser.push(NOTATIONS[name].write({"v": 5})), *parser.finish(True)])
    assert [json.loads(written) for _, written in out.calls] == [{"v": 5}]


def test_the_table_is_as_long_as_it_says() -> None:
    assert len(VALUES) >= 40
    assert len(NOTATIONS) >= 16
    assert all(as_json(exactly(written)) == written for _, written in VALUES)


@pytest.mark.parametrize("name", FORCED)
def test_limits_hold_for_listed_texts_too(name: str) -> None:
    schema = {"enum": ["aa", "b"], "minLength": 2}
    constraint = constraint_of(None, tools(schema), "required", NOTATIONS[name].format.tools, special=SPECIAL)
    assert verdict(constraint, NOTATIONS[name].forced({"v": "aa"})) == "whole"
    assert verdict(constraint, NOTATIONS[name].forced({"v": "b"})).startswith("wrong")


@pytest.mark.parametrize("date", ["2026-04-31", "2026-02-30", "2026-13-01", "2026-00-10", "2026-01-00"])
def test_days_that_no_month_has_can_not_be_written(date: str) -> None:
    schema = {"type": "string", "format": "date"}
    constraint = constraint_of(None, tools(schema), "required", "xml", special=SPECIAL)
    assert verdict(constraint, NOTATIONS["xml"].forced({"v": date})).startswith("wrong")


@pytest.mark.parametrize("name", FORCED)
def test_parameters_that_are_no_object_are_refused(name: str) -> None:
    made = [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]
    with pytest.raises(InvalidRequestError, match="f: no arguments match"):
        constraint_of(None, made, "required", NOTATIONS[name].format.tools, special=SPECIAL)
