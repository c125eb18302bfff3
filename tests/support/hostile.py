"""Grammars, schemas and tools that are made to overflow a stack; a program that compiles them and has to survive.

python -m tests.support.hostile SEED COUNT
"""

from __future__ import annotations

import json
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from mlx_specprefill import Constraint, InvalidRequestError
from mlx_specprefill.choosing.constraints import Grammars
from mlx_specprefill_server.constrained.answer_grammar import constraint_of
from mlx_specprefill_server.constrained.output_format import OutputFormat
from tests.server.fakes import byte_tokenizer

SMALLEST_STACK = 512 << 10  # bytes; what macOS gives a thread that asks for none
NOTATIONS = ("hermes", "xml", "harmony", "mistral", "gemma", "glm", "minimax")
LONGEST_JSON = 250  # levels that the server lets through
Make = Callable[[random.Random, int], Any]

# --- Lark ------------------------------------------------------------------------------------------------------------

RULES = (
    "NEXT", '"a" NEXT "b"', '"a" | NEXT "b"', "NEXT?", "(NEXT)", "[NEXT]", "NEXT{0,3}", "((NEXT | /x/) NEXT)?",
    '("a" | ("b" NEXT)) "c"', "NEXT // NEXT", '"NEXT" NEXT', "NEXT /[a-z/]NEXT/", "NEXT <[3]>",
)  # fmt: skip
TERMINALS = ("NEXT", '"a" NEXT "b"', "/a/ & NEXT", "~(NEXT)", '"a" (NEXT | "b")', "~(~(NEXT & /b/))")
BETWEEN = ("\n", "\n\n", "\n  // r0: T1\n", "\n# start: x\n")


def chain(rng: random.Random, count: int) -> str:
    """Rules or terminals, each of which refers to the next, in any order; some in a circle."""
    name, bodies = rng.choice([("r", RULES), ("r-x_", RULES), ("_r", RULES), ("T", TERMINALS), ("_T-X", TERMINALS)])
    body, mark = rng.choice(bodies), rng.choice(["", "?"]) if bodies is RULES else ""
    lines = [f"{mark}{name}{i}: {body.replace('NEXT', f'{name}{i + 1}')}" for i in range(count)]
    back = f' | "a" {name}0' if bodies is RULES and rng.random() < 0.3 else ""
    lines += [f'{name}{count}: "a"{back}', f"start: {name}0"]
    if rng.random() < 0.5:
        rng.shuffle(lines)
    return rng.choice(BETWEEN).join(lines)


def nested_block(rng: random.Random, count: int) -> str:
    return f"start: s\ns: %lark {{\n{chain(rng, count)}\n}}"


def brackets(rng: random.Random, count: int) -> str:
    opens, closes = rng.choice([("(", ")"), ("[", "]"), ("(", ")?"), ('("a" ', ")"), ('("a" | ', ")*"), ("~(", ")")])
    return f"start: S\nS: {opens * count}'a'{closes * count}".replace("'", '"')


def regex(rng: random.Random, count: int) -> str:
    opens, closes = rng.choice([("(", ")"), ("(?:a", "b)*"), ("(a|", ")"), ("[^", "]"), ("(?=", ")"), ("a{0,", "}")])
    return f"start: /{opens * count}a{closes * count}/"


def repeats(rng: random.Random, count: int) -> str:
    what = rng.choice(['"ab"', "/[ab]c?/", "r", '("a" | "b")'])
    return f'start: ({what}{{{rng.choice([0, count])},{count}}}){{1,{rng.choice([1, count])}}}\nr: "x" | "y" r'


def many(rng: random.Random, count: int) -> str:
    parts = [rng.choice(['"a{}"', "/a{}b?/", "r{}"]).format(i) for i in range(count)]
    rules = [f'r{i}: "x{i}"' for i in range(count)]
    return "\n".join(["start: " + rng.choice([" | ", " "]).join(parts), *rules])


def operators(rng: random.Random, count: int) -> str:
    return f'start: {rng.choice(["~", "!", ""]) * count}"a"{rng.choice(["?", "*", "{1,2}", " | ", "~2"]) * count}'


# --- JSON schemas ----------------------------------------------------------------------------------------------------

WRAPS: tuple[Callable[[Any], Any], ...] = (
    lambda inner: inner,
    lambda inner: {"type": "array", "items": inner},
    lambda inner: {"type": "object", "properties": {"a": inner}},
    lambda inner: {"type": "object", "properties": {"a": inner, "b": {}}, "required": ["a"]},
    lambda inner: {"anyOf": [inner, {"type": "null"}]},
    lambda inner: {"oneOf": [{"type": "null"}, inner]},
    lambda inner: {"allOf": [inner, {"title": "x"}]},
    lambda inner: {"type": "array", "prefixItems": [{}, inner]},
    lambda inner: {"type": "object", "additionalProperties": inner},
    lambda inner: {"type": "object", "patternProperties": {"^a": inner}},
    lambda inner: {**inner, "minimum": 1},
)


def references(rng: random.Random, count: int) -> Any:
    """Definitions, each of which refers to the next, by every kind of reference."""
    word, wrap = rng.choice(["$defs", "definitions"]), rng.choice(WRAPS)
    spell, extra = rng.choice(
        [
            (lambda i: f"#/{word}/a{i}", lambda i: {}),
            (lambda i: f"#/{word}/%61{i}", lambda i: {}),
            (lambda i: f"#a{i}", lambda i: {"$anchor": f"a{i}"}),
            (lambda i: f"http://x/a{i}", lambda i: {"$id": f"http://x/a{i}"}),
            (lambda i: f"#/{word}/a{i}/b", lambda i: None),
        ]
    )  # fmt: skip
    named = {}
    for i in range(count + 1):
        last = rng.choice([{"type": "integer"}, {"$ref": spell(0)}]) if i == count else wrap({"$ref": spell(i + 1)})
        named[f"a{i}"] = {"b": last} if extra(i) is None else {**last, **extra(i)}
    return {"$ref": spell(0), word: named}


def nested(rng: random.Random, count: int) -> Any:
    schema: Any = {"type": "integer"}
    wraps = rng.sample(WRAPS, 2)
    for i in range(min(count, LONGEST_JSON // 3)):
        schema = wraps[i % 2](schema)
    return schema


def constant(rng: random.Random, count: int) -> Any:
    value: Any = 1
    for _ in range(min(count, LONGEST_JSON - 2)):
        value = rng.choice([[value], {"a": value}])
    return {rng.choice(["const", "default", "x"]): value} if rng.random() < 0.7 else {"enum": [value]}


def wide(rng: random.Random, count: int) -> Any:
    count = min(count, 1000)
    members = {f"p{i}": {"type": "integer"} for i in range(count)}
    branches = [{"properties": {f"p{i}": {"const": i}}, "required": [f"p{i}"]} for i in range(count)]
    return rng.choice(
        [
            {"type": "object", "properties": members},
            {"type": "object", "properties": members, "additionalProperties": False, "required": list(members)},
            {"type": "object", "patternProperties": {f"^p{i}$": {} for i in range(count)}},
            {"anyOf": branches},
            {"oneOf": branches},
            {"allOf": branches[:8]},
            {"enum": list(members)},
            {"oneOf": [{"enum": list(members)}, {"enum": list(range(count))}]},
            {"type": "array", "prefixItems": [{}] * count},
            {"type": "array", "minItems": count, "maxItems": 2 * count},
            {"type": "string", "minLength": count, "pattern": "(a|b)?" * min(count, 2000)},
        ]
    )  # fmt: skip


LARK: tuple[Make, ...] = (chain, chain, chain, nested_block, brackets, regex, repeats, many, operators)
SCHEMAS: tuple[Make, ...] = (references, references, references, nested, constant, wide)


def constraints(rng: random.Random) -> Iterator[tuple[str, Callable[[], Constraint]]]:
    """Yield, without end, a kind and how to build a constraint of it."""
    while True:
        count = int(10 ** rng.uniform(0.5, 3.5))
        if rng.random() < 0.5:
            make = rng.choice(LARK)
            text = make(rng, count)
            yield make.__name__, lambda text=text: Constraint(text, "grammar")
            continue
        make = rng.choice(SCHEMAS)
        schema, notation = make(rng, count), rng.choice((None, *NOTATIONS))
        if notation is None:
            yield make.__name__, lambda schema=schema: _formatted(schema)
        else:
            yield f"{notation} {make.__name__}", lambda schema=schema, notation=notation: _called(schema, notation)


def _formatted(schema: Any) -> Constraint:
    constraint = constraint_of(OutputFormat("json_schema", schema))
    assert constraint is not None
    return constraint


def _called(schema: Any, notation: str) -> Constraint:
    members = {"a": {"$ref": schema["$ref"]}} if "$ref" in schema else {"a": schema}
    shared = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
    parameters = {"type": "object", "properties": members, **shared}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    constraint = constraint_of(None, [tool], "required", notation)
    assert constraint is not None
    return constraint


def survive(seed: int, count: int) -> Counter[str]:
    """Compile `count` of them. Return how many were taken and refused."""
    tokenizer = byte_tokenizer()
    grammars, ends = Grammars(tokenizer, frozenset(tokenizer.eos_token_ids)), Counter[str]()
    for (kind, build), _ in zip(constraints(random.Random(seed)), range(count), strict=False):
        print(kind, file=sys.stderr, flush=True)  # the last line tells what ended the process
        try:
            grammars.check(build())
        except InvalidRequestError:
            ends["refused"] += 1
        else:
            ends["taken"] += 1
    return ends


def main() -> None:
    seed, count = map(int, sys.argv[1:])
    threading.stack_size(SMALLEST_STACK)
    ends: list[Counter[str]] = []
    thread = threading.Thread(target=lambda: ends.append(survive(seed, count)))
    thread.start()
    thread.join()
    print(json.dumps(ends[0]))


if __name__ == "__main__":
    main()
