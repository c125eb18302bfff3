"""Which tokens of a vocabulary are structure, and where their names stand in a text.

Control tokens are the special ones, those that end an answer, those with a name that is only ever given to control
tokens (`<|…|>`), and what template and parsers treat as structure, such as `<think>` and `<tool_call>`. Other added
tokens (`<table>`, runs of spaces) are text like any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from ..parsers.formats import THINK_TAGS, reasoning_tags
from .spans import TURN_ENDS

__all__ = ["NOTHING", "ControlTokens"]

NOTHING: frozenset[str] = frozenset()
BY_CONVENTION = re.compile(r"<\|.*>|<.*\|>|<｜.*｜>", re.DOTALL)
BRACKETED = re.compile(r"[<\[◁]\S*[>\]▷]")
TAG = re.compile(r"</?[^\s<>|｜]+>")
WORD = re.compile(r"\W*(\w+)\W*")

Places = list[tuple[int, int]]


class ControlTokens:
    """The control tokens of one tokenizer, an mlx_lm TokenizerWrapper.

    Attributes:
        ids: by name.
        operator: tags that are no special tokens, such as `<tool_call>`. System prompts may show them to the model.
        model: those, and the tags of its reasoning: what an assistant's message may have as the model wrote it.
    """

    def __init__(self, tokenizer: Any) -> None:
        known = getattr(tokenizer, "added_tokens_decoder", {})
        template = str(getattr(tokenizer, "chat_template", "") or "")
        structure = {*chain.from_iterable(THINK_TAGS.values()), *_call_tags(tokenizer)}
        ends = set(tokenizer.eos_token_ids)

        def is_control(token: int, name: str, special: bool) -> bool:
            named = name in structure or (BRACKETED.fullmatch(name) is not None and name in template)
            return special or named or token in ends or BY_CONVENTION.fullmatch(name) is not None

        # A token that only stands alone as a word can't be told from text by its name.
        added = {t: token for t, token in known.items() if token.content and not token.single_word}
        self.ids = {token.content: t for t, token in added.items() if is_control(t, token.content, bool(token.special))}
        plain = {added[t].content for t in self.ids.values() if not added[t].special and t not in ends}
        self.operator = frozenset(name for name in plain if TAG.fullmatch(name) and name not in TURN_ENDS)
        thinks = "\n".join(reasoning_tags(tokenizer) or ())
        self.model = self.operator | {name for name in self.ids if name in thinks and name not in TURN_ENDS}
        self._pattern = re.compile(_longest_of(self.ids) if self.ids else r"(?!)", re.DOTALL)
        self._joined = "\0".join(self.ids)
        self._longest = max(map(len, self.ids), default=0)
        self._beginnings = {name[:end] for name in self.ids for end in range(1, len(name))}
        self._ends = {name[start:] for name in self.ids for start in range(1, len(name))}
        self._words = {match[1] for name in self.ids if (match := WORD.fullmatch(name))}

    def places(self, text: str) -> Places:
        """Where names stand, as tokenizers match them: the first, and of several the longest."""
        return [match.span() for match in self._pattern.finditer(text)]

    def in_content(self, text: str, kept: frozenset[str] = NOTHING, words: bool = False) -> Places:
        """What could be taken for a control token in this text, or in this text between any others.

        Names, and the parts of names at its ends, which a template could complete.

        Args:
            kept: these names stay as they are.
            words: also a text that is no more than the word in a name, as in the tags that templates make of keys.
        """
        runs, out = list(self._runs(text, kept)), []
        for start, end in runs:
            inside = [place for place in self.places(text[start:end]) if place[0] < place[1]]
            out += [(start + a, start + b) for a, b in self._with_ends(text[start:end], inside, words)]
        return out

    def _runs(self, text: str, kept: frozenset[str]) -> Iterator[tuple[int, int]]:
        """The parts between the names that stay."""
        at = 0
        for match in self._pattern.finditer(text) if kept else ():
            if match[0] in kept:
                yield at, match.start()
                at = match.end()
        yield at, len(text)

    def _with_ends(self, run: str, inside: Places, words: bool) -> Places:
        if len(run) < self._longest and self._is_part(run, words):
            return [(0, len(run))]
        first, last = (inside[0][0], inside[-1][1]) if inside else (len(run), 0)
        sizes = range(min(self._longest - 1, len(run)), 0, -1)
        lead = next((size for size in sizes if size <= first and run[:size] in self._ends), 0)
        tail = next(
            (size for size in sizes if len(run) - size >= max(last, lead) and run[-size:] in self._beginnings), 0
        )
        return [*([(0, lead)] if lead else []), *inside, *([(len(run) - tail, len(run))] if tail else [])]

    def _is_part(self, run: str, words: bool) -> bool:
        return (words and run in self._words) or (
            not run.isalnum() and bool(run.strip("_ \t\r\n")) and run in self._joined
        )


def _call_tags(tokenizer: Any) -> set[str]:
    """Those that mlx-lm reads calls by."""
    return {tag for name in ("tool_call_start", "tool_call_end") if (tag := getattr(tokenizer, name, None))}


def _longest_of(names: Iterable[str]) -> str:
    """A pattern that finds the longest of the names in time linear in the text, whatever they have in common."""
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        for char in name:
            node = node.setdefault(char, {})
        node[""] = {}
    return _branches(tree)


def _branches(node: dict[str, Any]) -> str:
    ways = [re.escape(char) + _branches(following) for char, following in sorted(node.items()) if char]
    if not ways:
        return ""
    return f"(?:{'|'.join(ways)})" + ("?" if "" in node else "")
