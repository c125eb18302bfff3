"""Grammars in llguidance's Lark dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlx_specprefill import InvalidRequestError

from ..big_json import dumps
from ..http.errors import refusal
from ..notations import muse
from .enforceable import COMPACT, EnforceableSchema, Schema

LARGEST = 1 << 20  # characters of a grammar, as in the library; a larger one is not even built
_ESCAPED_OR_SPECIAL = re.compile(r"\\.|/|\n", re.DOTALL)


class Lark:
    """A grammar under construction. Its methods return names that other rules can refer to.

    Args:
        special: the tokenizer's added tokens. In a literal they stand for themselves, not for their spelling.
        field: of the body, in errors about the whole.

    Attributes:
        warnings: sentences about parts of schemas that are not enforced, in their order.
    """

    def __init__(self, special: Mapping[str, int], field: str) -> None:
        self.special = special
        self.warnings: dict[str, None] = {}
        self._rules: dict[str, str] = {}
        self._names: dict[tuple[str, str, str], str] = {}
        self._field = field
        self._size = 0
        markers = sorted(filter(None, special), key=len, reverse=True)
        self._markers = re.compile(f"({'|'.join(map(re.escape, markers))})") if markers else None

    def text(self) -> str:
        """Return the whole grammar."""
        return "\n".join(f"{name}: {body}" for name, body in self._rules.items())

    def define(self, name: str, body: str) -> str:
        """Add a rule (lower case) or a terminal (upper case) with this very name.

        Raises:
            InvalidRequestError: the grammar is too large.
        """
        self._size += len(body)
        if self._size > LARGEST:
            raise refusal(self._field, f"the grammar has more than {LARGEST} characters")
        self._rules[name] = body
        return name.partition("[")[0]

    def rule(self, kind: str, body: str, options: str = "") -> str:
        """Return a rule with a name of its own, or one that has been added with this body."""
        key = kind, body, options
        if key not in self._names:
            self._names[key] = self.define(self.unused(kind) + options, body)
        return self._names[key]

    def unused(self, kind: str) -> str:
        """Return a name that no rule has yet, for one that is defined at once."""
        return f"{kind}_{len(self._rules)}"

    def literal(self, text: str) -> str:
        """Return exactly this text, with special tokens as tokens."""
        parts = self._markers.split(text) if self._markers else [text]
        return " ".join(f"<[{self.special[p]}]>" if p in self.special else _quote(p) for p in parts if p) or '""'

    def any_of(self, texts: Iterable[str]) -> str:
        """Return a choice of several literal texts: one terminal, for a parser compares rules one by one."""
        return self.rule("CHOICE", " | ".join(_quote(text) for text in texts))

    def json(self, schema: Mapping[str, Any], strict: bool = True, field: str = "schema") -> str:
        """Return JSON that matches a schema; warns and raises as `enforceable`."""
        return self.enforced_json(self.enforceable(schema, strict, field))

    def enforced_json(self, schema: Mapping[str, Any]) -> str:
        """Return JSON that matches a schema that `enforceable` has returned."""
        return self.rule("json", f"%json {dumps({**schema, 'x-guidance': COMPACT}).decode()}")

    def enforceable(self, schema: Mapping[str, Any], strict: bool, field: str, whose: str = "") -> Schema:
        """Return the part of a schema that can be enforced. There is a warning for each other part.

        Args:
            whose: name of the schema in messages, besides `field`.

        Raises:
            InvalidRequestError: no value can follow the schema, or `strict`, and it has other parts.
        """
        try:
            part = EnforceableSchema(schema, strict)
        except ValueError as error:
            raise InvalidRequestError(f"{field}: {whose}{error}", field=field) from error
        sentences = [f"{field}: {whose}{sentence}" for sentence in part.left_out]
        if strict and sentences:
            raise InvalidRequestError(sentences[0], field=field)
        self.warnings |= dict.fromkeys(sentences)
        return part.schema

    def regex(self, pattern: str) -> str:
        """Return text that matches a regular expression as a whole."""
        return self.rule("regex", terminal(pattern))

    def free_text(self, end: str, excluded: Sequence[str] = (), pattern: str = "") -> str:
        """Return text up to and including the literal `end` that matches a regular expression as a whole, and has none
        of the excluded marks; without any, it has no `end`.
        """
        all_of = " & ".join(map(terminal, filter(None, (pattern, without(*(excluded or (end,)))))))
        found = self._markers.search(end) if self._markers else None
        at = found.start() if found else len(end)  # of a token, which no text can hold
        text = self.rule("TEXT", f"({all_of}) {_quote(end[:at])}")
        return self.rule("text", f"{text} {self.literal(end[at:])}") if found else self.rule("text", text, "[lazy]")

    def muse_head(self, recipient: str) -> str:
        """Return the header of one of Muse's messages. The prompt holds the beginning of the first one."""
        return f"({self.literal(muse.START)})? {self.literal(f' to={recipient}{muse.MESSAGE}')}"

    def analysis(self) -> str:
        """Return the rule of the reasoning that harmony's models may write before they answer or call."""
        end = self.free_text("<|end|>")
        start, again = self.literal("<|channel|>analysis<|message|>"), self.literal("<|start|>assistant")
        return self.rule("analysis", f"({start} {end} {again})?")


def terminal(pattern: str) -> str:
    """Return a regular expression as a terminal."""
    body = _ESCAPED_OR_SPECIAL.sub(lambda m: {"/": r"\/", "\n": r"\n"}.get(m[0], m[0]), pattern)
    return f"/(?:{body})/"


def without(*marks: str) -> str:
    """Return a regular expression of all texts without marks, which begin with one character that each has once.

    It says what may come behind each beginning of a mark. The complement says the same, but that no text is left behind
    a mark is more than the grammar library finds out beside a limit of a length, and then the mark is permitted.
    """
    first = re.escape(marks[0][0])
    return f"[^{first}]*(?:{first}{_rest(first, [mark.strip()[1:] for mark in marks])})*"


def _rest(first: str, tails: Sequence[str]) -> str:
    """Return what may come behind the beginning of marks that would go on with these tails, up to the next one."""
    following = {tail[0]: [other[1:] for other in tails if other[0] == tail[0]] for tail in tails}
    ways = (f"|{re.escape(one)}{_rest(first, rest)}" for one, rest in following.items() if "" not in rest)
    return f"(?:[^{first}{''.join(map(re.escape, following))}][^{first}]*{''.join(ways)})?"


def escaped(text: str) -> str:
    """Return a regular expression of exactly this text."""
    return re.escape(text).replace("\\\n", r"\n")


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")
