"""Grammars grow with what they are made from, and are made beside the event loop."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest

from mlx_specprefill import Constraint, InvalidRequestError
from mlx_specprefill.choosing.constraints import Grammars
from mlx_specprefill_server import schemas
from mlx_specprefill_server.constrained import lark
from mlx_specprefill_server.constrained.answer_grammar import constraint_of
from mlx_specprefill_server.constrained.enforceable import EnforceableSchema
from mlx_specprefill_server.constrained.output_format import OutputFormat

from .conftest import client_of
from .fakes import FakeEngine, byte_tokenizer

TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER, frozenset(TOKENIZER.eos_token_ids))
(STOP,) = TOKENIZER.eos_token_ids
NOTATIONS = ("hermes", "xml", "harmony", "mistral", "gemma", "glm", "minimax")


def own(i: int) -> Any:
    return {"$ref": f"#/$defs/d{i}"}


def shared(i: int) -> Any:
    return {"$ref": "#/$defs/d0", "description": f"the member {i}"}


def plain(i: int) -> Any:
    return {"type": "integer", "minimum": i}


def in_an_array(i: int) -> Any:
    return {"type": "array", "items": {"anyOf": [{"$ref": f"#/$defs/d{i}"}, {"type": "null"}]}}


def tool(count: int, member: Any, required: int) -> dict[str, Any]:
    properties = {f"p{i}": member(i) for i in range(count)}
    definitions = {f"d{i}": {"type": "object", "properties": {f"q{i}": {"type": "integer"}}} for i in range(count)}
    parameters = {"properties": properties, "required": list(properties)[:required], "$defs": definitions}
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **parameters}}}


def size(constraint: Constraint | None) -> int:
    return len(constraint.grammar)


@pytest.mark.parametrize("notation", NOTATIONS)
@pytest.mark.parametrize("member", [own, shared, plain, in_an_array])
@pytest.mark.parametrize("required", [0, 1])
def test_a_grammar_grows_no_faster_than_its_tool(notation: str, member: Any, required: int) -> None:
    small, large = (
        size(constraint_of(None, [tool(count, member, required)], "required", notation)) for count in (60, 240)
    )
    assert large < 5 * small


class Counted(int):
    """A number that counts its comparisons."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def one_of(branches: list[Any]) -> list[str]:
    return EnforceableSchema({"oneOf": branches}).left_out


@pytest.mark.parametrize("count", [200, 400])
def test_branches_of_a_one_of_are_compared_in_linear_time(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(schemas.KINDS, Counted, "integer")
    Counted.compared = 0
    numbers = [Counted(i) for i in range(count)]
    assert not one_of([{"enum": numbers}, {"enum": [f"{i}" for i in range(count)]}])
    assert not one_of([{"const": number} for number in numbers])
    kinds = [{"type": "object", "properties": {"k": {"const": n}}, "required": ["k"]} for n in numbers]
    assert not one_of([*kinds, {"type": "null"}])
    assert one_of([*kinds, kinds[0]])
    assert Counted.compared <= 20 * count


@pytest.mark.parametrize(
    ("branches", "exclusive"),
    [
        ([{"enum": [1, 2]}, {"enum": [3]}], True),
        ([{"enum": [1, 2]}, {"enum": [2.0]}], False),
        ([{"enum": [[1, {"a": 2}]]}, {"enum": [[1, {"a": 2}]]}], False),
        ([{"enum": [1, 1]}, {"enum": [2]}], True),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([{"type": "integer"}, {"type": ["string", "null"]}], True),
        ([{"type": "integer"}, {}], False),
        ([{"enum": ["a"]}, {"type": "string", "enum": ["b"]}, {"type": "null"}], True),
        ([{"enum": [1]}, {"enum": [True]}], True),
        ([{"enum": ["a"]}, {"type": "string", "enum": ["b"]}], True),
        ([{"const": i} for i in range(100)], True),
        ([{"const": i % 99} for i in range(100)], False),
    ],
)
def test_exclusive_branches_are_known(branches: list[Any], exclusive: bool) -> None:
    assert (not one_of(branches)) is exclusive


# --- choices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 1000, 10_000])
def test_any_of_thousands_of_choices_can_be_answered(count: int) -> None:
    texts = tuple(f"{'the ' * (i % 5)}choice number {i}" for i in range(count))
    constraint = constraint_of(OutputFormat("choice", texts))
    assert constraint is not None
    GRAMMARS.check(constraint)
    for text in (texts[0], texts[count // 2], texts[-1]):
        state = GRAMMARS.state(constraint, frozenset({STOP}))
        for token in TOKENIZER.encode(text, add_special_tokens=False):
            mask = state.mask(len(TOKENIZER))
            assert mask[token]
            state.accept(token)
        mask = state.mask(len(TOKENIZER))
        assert mask[STOP]


def test_more_text_than_a_grammar_may_have_is_refused_at_once() -> None:
    with pytest.raises(InvalidRequestError, match=r"^response_format: the grammar has more than"):
        constraint_of(OutputFormat("choice", tuple(f"{i}{'x' * 200}" for i in range(9_000))))


def test_what_fails_at_the_second_token_is_refused_by_the_check() -> None:
    rules = [f'r{i}: "a{i}b"' for i in range(2000)]
    grammar = "\n".join(["start: " + " | ".join(f"r{i}" for i in range(2000)), *rules])
    with pytest.raises(InvalidRequestError, match=r"^grammar: .*items"):
        GRAMMARS.check(Constraint(grammar, "grammar"))


def test_grammars_are_built_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
    threads: list[str] = []

    class Watched(EnforceableSchema):
        def __init__(self, *given: Any) -> None:
            threads.append(threading.current_thread().name)
            super().__init__(*given)

    monkeypatch.setattr(lark, "EnforceableSchema", Watched)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    asked = {"max_tokens": 1, "response_format": schema}
    client = client_of(engine)
    client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], **asked})
    client.post("/v1/completions", json={"prompt": "Hi", **asked})
    assert len(threads) == 2
    assert all(name.startswith("prompts") for name in threads)


# --- what a schema allows -------------------------------------------------------------------------------------------


def test_references_that_fan_out_are_resolved_once() -> None:
    fans = {f"d{i}": {"anyOf": [own(i + 1), own(i + 1), {"allOf": [own(i + 1)] * 2}]} for i in range(60)}
    parameters = {
        "type": "object",
        "properties": {"near": own(58), "far": own(0)},
        "$defs": {**fans, "d60": {"type": "integer"}},
    }
    places = schemas.Places(parameters)
    assert places["near"].types == {"integer"}
    assert places["far"].open


def test_compositions_are_not_multiplied_beyond_the_limit() -> None:
    many = {"anyOf": [{"const": i} for i in range(1000)]}
    assert schemas.Resolver({}).place({"type": "integer", "allOf": [many] * 40}).types == {"integer"}


@pytest.mark.parametrize("notation", NOTATIONS)
def test_members_that_never_repeat_are_refused_or_written(notation: str) -> None:
    """Two circles of members of different lengths, that hold at once, have as many pairs as the product."""
    circles = {
        f"{name}{i}": {
            "type": "object",
            "required": ["n"],
            "properties": {"n": {"$ref": f"#/$defs/{name}{(i + 1) % size}"}},
        }
        for name, size in (("a", 97), ("b", 101))
        for i in range(size)
    }
    both = {"allOf": [{"$ref": "#/$defs/a0"}, {"$ref": "#/$defs/b0"}]}
    parameters = {"type": "object", "properties": {"x": both}, "$defs": circles}
    one = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with contextlib.suppress(InvalidRequestError):
        GRAMMARS.check(constraint_of(None, [one], "required", notation))
