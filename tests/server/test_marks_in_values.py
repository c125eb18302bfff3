"""Whatever the grammar of a forced call lets into a value, a notation's own marks too, is read as it was meant."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from mlx_specprefill.choosing.constraints import Grammars, LLGuidanceState
from mlx_specprefill_server.constrained.answer_grammar import constraint_of

from .fakes import SPECIALS, byte_tokenizer
from .notations import FORCED, NOTATIONS, Notation
from .parsers.reading import collected

LONGEST = 2000  # tokens
MANY = 100  # tokens; where as many are permitted, a text is written
BYTES = byte_tokenizer(specials=())  # spells marks that others have as tokens

TEXT, INTEGER = {"type": "string"}, {"type": "integer", "minimum": 0, "maximum": 999}
TEXTS: list[Any] = [
    TEXT,
    TEXT,
    TEXT | {"minLength": 3},
    TEXT | {"minLength": 100, "maxLength": 101},
    TEXT | {"maxLength": 40},
    TEXT | {"pattern": "^[^x]{3,60}$"},
]
OTHERS: list[Any] = [
    INTEGER,
    {"type": "boolean"},
    {"enum": ["x", "y z", 5, None, ["<"]]},
    {"type": ["string", "null"]},
    {"anyOf": [TEXT, INTEGER]},
    {"type": "object", "properties": {"u": TEXT}, "required": ["u"]},
    {},
]


def any_schema(rng: random.Random, depth: int) -> Any:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(TEXTS)
    if kind < 0.7 or depth > 2:
        return rng.choice(OTHERS)
    if kind < 0.85:
        return {"type": "array", "items": any_schema(rng, depth + 1), "minItems": 1, "maxItems": 2}
    return any_object(rng, depth + 1)


def any_object(rng: random.Random, depth: int = 0) -> Any:
    names = rng.sample(["v", "w", "x>y", "a b", "k"], rng.randint(1, 3))
    members = {name: any_schema(rng, depth) for name in names}
    return {"type": "object", "properties": members, "required": names, "additionalProperties": False}


def marks(notation: Notation) -> list[str]:
    """The marks of a notation, those that end a text twice, and what stands around them."""
    text = notation.write({"v": "*", "w": [{"a": "*"}]}) + notation.forced({"v": "*"})
    parts = re.findall(r"<[^<>]+>|\[[A-Z_]+\]|[^<>\s]", text)
    return [*notation.ends, '"', *dict.fromkeys([*parts, text, text.partition("*")[2], "\n", " ", '"', "\\"])]


def accepted(state: LLGuidanceState, tokens: list[int], size: int) -> list[int]:
    """The tokens up to the first that may not stand here."""
    for at, token in enumerate(tokens):
        mask = state.mask(size)
        if mask is None or not mask[token]:
            return tokens[:at]
        state.accept(token)
    return tokens


def walk(notation: Notation, tools: list[Any], tokenizer: Any, rng: random.Random) -> str:
    """A random text that the grammar takes, with marks where there may be any text; "" if it does not end soon."""
    constraint = constraint_of(None, tools, "required", notation.format.tools, parallel=False,
                               special=tokenizer.get_added_vocab())  # fmt: skip
    assert constraint is not None
    stops = frozenset(tokenizer.eos_token_ids)
    state, size, tokens = Grammars(tokenizer, stops).state(constraint, stops), len(tokenizer), list[int]()
    fragments = marks(notation)
    while len(tokens) < LONGEST:
        mask = state.mask(size)
        assert mask is not None
        permitted = [int(token) for token in mask.nonzero()[0]]
        if not stops.isdisjoint(permitted):
            return str(tokenizer.decode(tokens)).rpartition("<|start|>assistant")[2]
        new: list[int] = []
        if len(permitted) >= MANY:
            fragment = rng.choice(fragments if rng.random() < 0.7 else ["a", '"'])
            spelling = BYTES if rng.random() < 0.7 else tokenizer
            new = accepted(state, spelling.encode(fragment, add_special_tokens=False), size)
        tokens += new or accepted(state, [rng.choice(permitted)], size)
    return ""


def read(notation: Notation, tools: list[Any], text: str, cuts: list[int]) -> str:
    """The arguments of the only call."""
    parser = notation.format.parser(tools, "", as_json=True)
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    out = collected([delta for piece in pieces for delta in parser.push(piece)] + parser.finish(True))
    assert (out.text.strip(), out.broken, out.reasoning, len(out.calls)) == ("", [], "", 1), text
    return out.calls[0][1]


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 200), marks=pytest.mark.nightly)], ids=str)
@pytest.mark.parametrize("notation", [NOTATIONS[name] for name in FORCED], ids=FORCED)
def test_a_forced_value_is_read_as_it_was_meant(notation: Notation, seeds: range) -> None:
    tags = re.findall(r"<[^<>=\s]+>|\[[A-Z_]+\]|｜DSML｜", notation.write({"v": "*"}))
    tokenizers = [byte_tokenizer(specials=tuple(dict.fromkeys([*SPECIALS, *more]))) for more in ([], tags)]
    texts = []
    for seed in seeds:
        rng = random.Random(seed)
        parameters = any_object(rng)
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
        text = walk(notation, tools, tokenizers[seed % 2], rng)
        if not text:
            continue
        texts.append(text)
        written = read(notation, tools, text, [])
        assert [name for name, _ in json.loads(written, object_pairs_hook=list)] == parameters["required"], text
        jsonschema.validate(json.loads(written), parameters)
        assert written == read(notation, tools, text, sorted(rng.sample(range(1, len(text)), 5)))
    assert len(texts) > len(seeds) / 2
