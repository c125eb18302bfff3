"""Calls that a grammar forces come to an end, whatever the model likes."""

from __future__ import annotations

import re

import pytest

from mlx_specprefill.choosing.constraints import Grammars
from mlx_specprefill_server.constrained.answer_grammar import constraint_of
from mlx_specprefill_server.deltas import CallEnd
from mlx_specprefill_server.notations.formats import Format

from .fakes import byte_tokenizer

TOKENIZER = byte_tokenizer()
GRAMMARS = Grammars(TOKENIZER, frozenset(TOKENIZER.eos_token_ids))
(STOP,) = TOKENIZER.eos_token_ids
LONGEST = 3000


@pytest.mark.parametrize("tool_format", ["hermes", "xml", "mistral", "gemma", "glm", "lfm2"])
def test_calls_come_to_an_end_though_the_model_never_ends_them(tool_format: str) -> None:
    """The longest way through the grammar: whoever likes calls and white space gets no more of them than this."""
    flag = {"type": "object", "properties": {"flag": {"type": "boolean"}}, "required": ["flag"]}
    tools = [{"type": "function", "function": {"name": "one", "parameters": flag, "strict": True}}]
    constraint = constraint_of(None, tools, "required", tool_format, special=TOKENIZER.get_added_vocab())
    assert constraint is not None
    state, tokens = GRAMMARS.state(constraint, frozenset({STOP})), list[int]()
    while len(tokens) < 4 * LONGEST:
        mask = state.mask(len(TOKENIZER))
        liked = [int(token) for token in mask.nonzero()[0] if token != STOP]
        if not liked:
            break
        tokens.append(min(liked, key=lambda token: (not TOKENIZER.decode([token]).isspace(), token)))
        state.accept(tokens[-1])
    text = TOKENIZER.decode(tokens)
    parser = Format(tool_format, None).parser(tools, "", as_json=True)
    events = [*parser.push(text), *parser.finish(True)]
    assert sum(isinstance(event, CallEnd) for event in events) == 16
    assert not re.search(r"\s{3}", text)
