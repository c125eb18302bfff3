"""The table of readers: which one reads the calls of a format, behind which mark."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from ..notations import (
    ATEM,
    CALL,
    COMMAND,
    DEEPSEEK,
    DSML,
    DSML_4,
    END_CALL,
    END_COMMAND,
    END_GRANITE,
    END_LFM2,
    FUNCTION_GEMMA,
    GEMMA_4,
    GRANITE,
    JSON_MARKS,
    KIMI,
    LFM2,
    MINIMAX,
    MISTRAL_TAG,
    PYTHON_MARKS,
    PYTHON_TAG,
    SEED,
    STEP,
    XML,
)
from ..settings import ToolParser
from .base import Cursor, Reading, Tools, skip, spaces, starts_with
from .calls import FENCE, CallReader, fence
from .json_calls import (
    GEMMA_CALL,
    between_reader,
    gemma_reader,
    read_bare,
    read_bare_gemma,
    read_calls,
    read_mistral_tag,
)
from .marked_calls import marked_reader
from .tag_calls import read_functions, read_glm_body, tag_reader
from .tagged import Bare

EITHER_DSML = {tags.call: tag_reader(tags) for tags in (DSML, DSML_4)}
READERS: Mapping[ToolParser, Mapping[str, CallReader]] = {
    "mistral": {MISTRAL_TAG: read_mistral_tag},
    "gemma": {mark[0]: gemma_reader(*mark) for mark in (GEMMA_4, FUNCTION_GEMMA)},
    "minimax": {MINIMAX.call: tag_reader(MINIMAX)},
    "muse": {ATEM.call: tag_reader(ATEM)},
    "seed": {SEED.call: tag_reader(SEED)},
    "dsml": EITHER_DSML,
    "dsml4": EITHER_DSML,
    "kimi": dict.fromkeys((KIMI.section, KIMI.call), marked_reader(KIMI)),
    # the distillations fall back to Qwen's notation
    "deepseek": dict.fromkeys((DEEPSEEK.section, DEEPSEEK.call), marked_reader(DEEPSEEK))
    | {CALL: between_reader(CALL, END_CALL, known=True)},
    # Granite's mark has no end, Phi-4's has one
    "granite": {GRANITE: between_reader(GRANITE, END_GRANITE), CALL: between_reader(CALL, END_CALL)},
    "command": {COMMAND: between_reader(COMMAND, END_COMMAND)},
    "lfm2": {LFM2: between_reader(LFM2, END_LFM2, python=True)},
}
# The own readers of formats that mlx-lm has, too, by its opening mark. Its parsers change values.
OWN: dict[str, ToolParser] = {**{mark: name for name in READERS for mark in READERS[name]}, CALL: "hermes"}
# Calls without a tag.
BARE = Bare(read_bare, ("{", "["), ('[{"name"', '{"name"', '{"tool_calls"'))
EXAMPLE = "[func_name1("  # in the templates of Llama 3.2 and 4 and ToolACE, for calls as in Python
BARE_GEMMA = Bare(read_bare_gemma, (GEMMA_CALL,), ())


@cache
def other_readers() -> Mapping[str, CallReader]:
    """Return the readers of marks that need no format: behind them no other text is a call of a known tool."""
    python = {**PYTHON_MARKS, PYTHON_TAG: ""}
    return {STEP.call: tag_reader(STEP)} | {
        begin: between_reader(begin, end, known=begin != PYTHON_TAG, python=begin in python)
        for begin, end in {**JSON_MARKS, **python}.items()
    }


def read_tool_call(cursor: Cursor, tools: Tools) -> Reading[None]:
    """Read `<tool_call>` with any of three notations inside. Models fall back to the one they saw most."""
    cursor.take(len(CALL))
    yield from spaces(cursor)
    fenced = yield from fence(cursor)
    match (yield from starts_with(cursor, ("{", "[", XML.function))):
        case "{" | "[":
            yield from read_calls(cursor, tools, (END_CALL,))
        case "<function=":
            yield from read_functions(cursor, tools)
        case _:
            yield from read_glm_body(cursor, tools)
    yield from spaces(cursor)
    if fenced and (yield from skip(cursor, FENCE)):
        yield from spaces(cursor)
    yield from skip(cursor, END_CALL)
