"""Real text from the running Python installation. It is on every machine, so nothing is shipped.

Prose is the language reference behind `help()` and the docstrings of the standard library, code its modules' sources.
All of it differs between versions of Python: `described` says which one this is.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import platform
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .errors import NothingToDoError

try:
    from pydoc_data.topics import topics
except ImportError:  # some distributions leave it out
    topics = {}  # type: ignore[misc]

LEFT_OUT = frozenset(
    "test tests idlelib lib2to3 site-packages dist-packages encodings turtledemo pydoc_data ensurepip".split()
)
SHORTEST_DOCSTRING = 400  # characters; shorter ones say little that could be asked for
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_LETTERS = re.compile(r"[A-Za-z]+")


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of prose or code.

    `source` is the topic or object that it documents. `prose` marks sentences on one line; other text keeps its lines.
    """

    text: str
    source: str
    prose: bool


@dataclass(frozen=True)
class Module:
    """A module of the standard library with its source."""

    name: str
    source: str


@lru_cache(maxsize=1)
def modules() -> tuple[Module, ...]:
    """Return the public modules by name. Tests, applications and other people's packages are left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = ((path.relative_to(root).with_suffix("").parts, path) for path in root.rglob("[a-z]*.py"))
    named = {
        ".".join(parts): path for parts, path in paths if not LEFT_OUT & {*parts} and all(map(str.isidentifier, parts))
    }
    return tuple(Module(name, named[name].read_text("utf-8", errors="replace")) for name in sorted(named))


@lru_cache(maxsize=1)
def paragraphs() -> tuple[Paragraph, ...]:
    """Return each paragraph once, grouped by topic or docstring, in an order that depends on names only."""
    found = (paragraph for source, text in _documents() for paragraph in _split(source, text))
    return tuple({paragraph.text: paragraph for paragraph in found}.values())


@lru_cache(maxsize=1)
def described() -> str:
    """Return the version of Python and a digest of all texts. Equal digests mean equal items.

    Raises:
        NothingToDoError: this Python came without sources.
    """
    if not modules():
        raise NothingToDoError("real text is the standard library's sources, and this Python has none")
    digest = hashlib.sha256()
    for text in (*(paragraph.text for paragraph in paragraphs()), *(module.source for module in modules())):
        digest.update(text.encode("utf-8", errors="replace") + b"\0")
    return f"standard library of Python {platform.python_version()}, {digest.hexdigest()[:12]}"


def sentences(paragraph: Paragraph) -> list[str]:
    """Return the whole sentences of a paragraph of prose, without those that look like code."""
    found = _SENTENCE_END.split(paragraph.text) if paragraph.prose else []
    return [sentence for sentence in found if _is_whole(sentence) and _is_prose(sentence)]


def _is_whole(sentence: str) -> bool:
    return sentence[0].isupper() and sentence[-1] in ".!?" and sentence.count("(") == sentence.count(")")


def _documents() -> Iterator[tuple[str, str]]:
    for name in sorted(topics):
        yield name, topics[name]
    for module in modules():
        yield from _docstrings(module)


def _docstrings(module: Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree_of(module)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False) or ""
            if len(text) >= SHORTEST_DOCSTRING:
                name = module.name if isinstance(node, ast.Module) else f"{module.name}.{node.name}"
                yield name, inspect.cleandoc(text)


def tree_of(module: Module) -> ast.Module:
    """Parse a source. Return an empty tree if it is not of this version of Python."""
    try:
        return ast.parse(module.source)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _split(source: str, text: str) -> Iterator[Paragraph]:
    for block in re.split(r"\n\s*\n", text):
        if not block.strip():
            continue
        words = " ".join(block.split())
        prose = _is_prose(words) and words.endswith((".", ":", '."', ".)"))
        yield Paragraph(words if prose else block.rstrip(), source, prose)


def _is_prose(text: str) -> bool:
    """Return whether the text is mostly letters, in sentences."""
    return len(text) > 40 and sum(map(len, _LETTERS.findall(text))) > 0.74 * len(text) and ">>>" not in text
