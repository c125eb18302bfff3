"""The arguments of calls match the schemas that pydantic, zod and agents make: forced ones, and what models write."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from jsonschema.validators import validator_for

from mlx_specprefill import Constraint
from mlx_specprefill.choosing.constraints import LLGuidanceState
from mlx_specprefill_server.constrained.answer_grammar import constraint_of

from .notations import FORCED, NOTATIONS, Notation, in_all
from .parsers.reading import collected
from .test_output_format import GRAMMARS, SPECIAL, STOP, TOKENIZER
from .tool_schemas import schemas

SCHEMAS = schemas()

SEEDS = 1
LONGEST = 2000
MANY = 150  # tokens; where as many are permitted, text is free
TURN = "<|start|>assistant"


def tool(parameters: dict[str, Any], strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}


def walk(constraint: Constraint, rng: random.Random) -> str:
    """A random text that the grammar takes. Free text and containers end soon."""
    state, tokens = GRAMMARS.state(constraint, frozenset({STOP})), list[int]()
    while len(tokens) < LONGEST:
        mask = state.mask(len(TOKENIZER))
        permitted = [int(token) for token in mask.nonzero()[0]]
        if STOP in permitted:
            break
        chosen = [rng.choice(permitted)]
        if len(permitted) >= MANY:
            printable = [token for token in permitted if token < 256 and TOKENIZER.decode([token]).isprintable()]
            chosen = [rng.choice(printable)]
            chosen = (rng.random() < 0.4 and ending(state)) or chosen
        elif (closing := [t for t in permitted if TOKENIZER.decode([t]) in ('"', "]", "}")]) and rng.random() < 0.5:
            chosen = closing[:1]
        for token in chosen:
            state.accept(token)
        tokens += chosen
    return str(TOKENIZER.decode(tokens))


def ending(state: LLGuidanceState) -> list[int]:
    """The token that ends a text, [] if none may end here."""
    (quote,) = TOKENIZER.encode('"', add_special_tokens=False)
    mask = state.mask(len(TOKENIZER))
    return [quote] if mask is not None and mask[quote] else []


def read(notation: Notation, text: str, tools: list[dict[str, Any]], as_json: bool = False) -> list[Any]:
    parser = notation.format.parser(tools, "", as_json=as_json)
    out = collected([*parser.push(text), *parser.finish(True)])
    assert (out.text.strip(), out.broken) == ("", []), text
    return [json.loads(written) for _, written in out.calls]


def faults(schema: dict[str, Any], value: Any) -> list[str]:
    validator = validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    return [error.validator for error in validator.iter_errors(value)]


@pytest.mark.parametrize(("number", "name"), in_all(len(SCHEMAS), FORCED, pytest.mark.nightly))
def test_forced_arguments_match_the_schema(number: int, name: str) -> None:
    """A keyword that they do not follow is named in the warnings."""
    notation, schema, warnings = NOTATIONS[name], SCHEMAS[number], list[str]()
    tools = [tool(schema)]
    constraint = constraint_of(None, tools, "required", notation.format.tools, parallel=False, special=SPECIAL,
                               warnings=warnings)  # fmt: skip
    assert constraint is not None
    for seed in range(SEEDS):
        text = walk(constraint, random.Random(seed)).rpartition(TURN)[2]
        (arguments,) = read(notation, text, tools, as_json=True)
        unnamed = [word for word in faults(schema, arguments) if not any(word in said for said in warnings)]
        assert not unnamed, (text, arguments)


@pytest.mark.parametrize(("number", "name"), in_all(len(SCHEMAS), list(NOTATIONS), pytest.mark.nightly))
def test_what_a_model_writes_has_the_types_of_the_schema(number: int, name: str) -> None:
    """A valid object, written in the notation, is valid when it has been read."""
    notation, schema = NOTATIONS[name], SCHEMAS[number]
    constraint = constraint_of(None, [tool(schema)], "required", "hermes", parallel=False, special=SPECIAL)
    assert constraint is not None
    for seed in range(SEEDS):
        (meant,) = read(NOTATIONS["hermes"], walk(constraint, random.Random(seed)), [tool(schema)])
        (arguments,) = read(notation, notation.write(numbered(meant)), [tool(schema)])
        assert faults(schema, arguments) == faults(schema, meant), (meant, arguments)


def numbered(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_there_are_as_many_schemas_as_it_says() -> None:
    assert len(SCHEMAS) >= 60
