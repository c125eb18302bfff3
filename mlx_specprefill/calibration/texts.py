"""Texts that are on every machine, so that none has to be shipped, and where their passages stand among tokens."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..request import TokenIds

_MODULES = (
    "argparse threading subprocess logging difflib textwrap shutil zipfile tarfile socket ssl pathlib random".split()
)
_LEAST = 120  # characters of a docstring


@cache
def sources() -> tuple[str, ...]:
    """Return modules of the standard library in a fixed order; none where only compiled files are there."""
    specs = (find_spec(name) for name in _MODULES)
    files = (Path(spec.origin) for spec in specs if spec is not None and spec.origin is not None)
    return tuple(file.read_text(encoding="utf-8") for file in files if file.suffix == ".py")


@cache
def docstrings() -> tuple[str, ...]:
    """Return these modules' docstrings in a fixed order."""
    found: list[str] = []
    for source in sources():
        nodes = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef))
        found += [text for node in nodes if (text := ast.get_docstring(node)) and len(text) > _LEAST]
    return tuple(found)


def rendered(tokenizer: TokenizerWrapper, messages: Sequence[Mapping[str, str]]) -> str:
    """Return the messages as the chat template writes them; without one, their contents."""
    if tokenizer.has_chat_template:
        text: str = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return text
    return "\n\n".join(message["content"] for message in messages)


def located(
    tokenizer: TokenizerWrapper, text: str, places: Mapping[str, tuple[int, int]]
) -> tuple[TokenIds, dict[str, tuple[int, int]]]:
    """Return the text's tokens, and those of each place in it, from [start, end) of its characters.

    The text is tokenized in one piece. A place is found by the number of tokens before it.
    """
    ends = sorted({end for place in places.values() for end in place})
    index = {end: len(tokenizer.encode(text[:end], add_special_tokens=False)) for end in ends}
    tokens = np.asarray(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
    return tokens, {name: (index[start], index[end]) for name, (start, end) in places.items()}
