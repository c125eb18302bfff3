"""The search for deferred tools that this server answers itself: by regular expression, or by words (BM25)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import regex

from .prompt.conversation import SearchKind
from .prompt.deferred import tool_name
from .schemas import mapping_of

MOST_FOUND = 5  # tools
LONGEST_PATTERN = 200  # characters, Anthropic's limit
PATIENCE_S = 0.5  # for one pattern on all tools; some patterns take exponential time
K1, B = 1.2, 0.75  # Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009
# Also within names: get_weather, readFile, HTTPServer. Scripts without spaces have a word in each sign.
WORD = regex.compile(
    r"\p{Lu}?\p{Ll}+|\p{Lu}+(?!\p{Ll})|\p{N}+|[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}]|[\p{Lo}\p{M}]+"
)

_ASKS: Mapping[SearchKind, tuple[str, str]] = {
    "regex": (
        "Finds tools that are not listed yet, so that they can be called: those whose name, description or arguments "
        "a Python regular expression matches. (?i) ignores case.",
        f"a regular expression of at most {LONGEST_PATTERN} characters",
    ),
    "bm25": (
        "Finds tools that are not listed yet, so that they can be called: those whose name, description and arguments "
        "have the words of a query.",
        "words that say what the tool should do",
    ),
}


class SearchError(Exception):
    """A search that can't be made; the text is Anthropic's code for the reason."""


def search_tool(name: str, kind: SearchKind) -> dict[str, Any]:
    """Return the tool that the model calls to search, in the form of chat completions."""
    description, query = _ASKS[kind]
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": query}},
        "required": ["query"],
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def search(kind: SearchKind, arguments: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the tools that are found, best first.

    Args:
        arguments: of the model's call.
        tools: in the form of chat completions.

    Raises:
        SearchError: the arguments have no query, or its pattern can't be followed.
    """
    query = arguments.get("query", arguments.get("pattern"))
    if not isinstance(query, str) or not query or (kind == "regex" and len(query) > LONGEST_PATTERN):
        raise SearchError("invalid_tool_input")
    texts = {tool_name(tool): "\n".join(_texts(tool["function"])) for tool in tools}
    found = _matching(query, texts) if kind == "regex" else _ranked(query, texts)
    return found[:MOST_FOUND]


def _texts(function: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is searched of a tool: its name and description, and those of its arguments."""
    yield function["name"]
    yield str(function.get("description") or "")
    for name, schema in mapping_of(mapping_of(function.get("parameters")).get("properties")).items():
        yield f"{name} {mapping_of(schema).get('description') or ''}"


def _matching(pattern: str, texts: Mapping[str, str]) -> list[str]:
    try:
        compiled = regex.compile(pattern)
        return [name for name, text in texts.items() if compiled.search(text, timeout=PATIENCE_S / len(texts))]
    except regex.error as error:
        raise SearchError("invalid_tool_input") from error
    except TimeoutError as error:
        raise SearchError("execution_time_exceeded") from error


def _ranked(query: str, texts: Mapping[str, str]) -> list[str]:
    """Return the texts that have one of the words, by BM25."""
    counts = {name: Counter(_words(text)) for name, text in texts.items()}
    mean = sum(map(Counter.total, counts.values())) / max(1, len(counts))
    having = Counter(word for words in counts.values() for word in words)

    def score(words: Counter[str]) -> float:
        longer = 1 - B + B * words.total() / mean
        return sum(
            math.log(1 + (len(counts) - having[word] + 0.5) / (having[word] + 0.5))
            * words[word] * (K1 + 1) / (words[word] + K1 * longer)
            for word in set(_words(query))
        )  # fmt: skip

    scores = {name: score(words) for name, words in counts.items() if words}
    return sorted((name for name, value in scores.items() if value > 0), key=lambda name: -scores[name])


def _words(text: str) -> list[str]:
    return [word.casefold() for word in WORD.findall(text)]
