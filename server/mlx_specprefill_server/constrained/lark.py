"""Writes grammars in llguidance's Lark dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from mlx_specprefill import InvalidRequestError

from .enforceable import EnforceableSchema, Schema

__all__ = ["Lark"]

# At most one space, where people write one. A model could fill its whole answer with free whitespace.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_ESCAPED_OR_SPECIAL = re.compile(r"\\.|/|\n", re.DOTALL)


class Lark:
    """A grammar under construction. Its methods return names that other rules can refer to.

    Args:
        special: the tokenizer's added tokens. In a literal they stand for themselves, not for their spelling.

    Attributes:
        warnings: sentences about parts of schemas that are not enforced.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self.special = special
        self.warnings: list[str] = []
        self._rules: dict[str, str] = {}
        markers = sorted(filter(None, special), key=len, reverse=True)
        self._markers = re.compile(f"({'|'.join(map(re.escape, markers))})") if markers else None

    def text(self) -> str:
        """Return the whole grammar."""
        return "\n".join(f"{name}: {body}" for name, body in self._rules.items())

    def define(self, name: str, body: str) -> str:
        """Add a rule (lower case) or a terminal (upper case) with this very name."""
        self._rules[name] = body
        return name.partition("[")[0]

    def rule(self, kind: str, body: str, options: str = "") -> str:
        """Add a rule with a unique name."""
        return self.define(f"{kind}_{len(self._rules)}{options}", body)

    def literal(self, text: str) -> str:
        """Return exactly this text, with special tokens as tokens."""
        parts = self._markers.split(text) if self._markers else [text]
        return " ".join(f"<[{self.special[p]}]>" if p in self.special else _quote(p) for p in parts if p) or '""'

    def any_of(self, texts: Iterable[str]) -> str:
        """Return a choice of several literal texts."""
        return self.rule("choice", " | ".join(_quote(text) for text in texts))

    def json(self, schema: Mapping[str, Any], strict: bool = True, field: str | None = None) -> str:
        """Return JSON that matches a schema. Unless `strict`, keywords that can't be enforced are ignored with a
        warning.

        Raises:
            InvalidRequestError: the schema is nested too deeply, or holds such a keyword.
        """
        enforced = self.enforceable(schema, strict, field)
        try:
            text = orjson.dumps({**enforced, "x-guidance": {**_COMPACT, "lenient": not strict}}).decode()
        except TypeError as error:
            raise InvalidRequestError(f"{field}: the schema can't be read: {error}", field=field) from error
        return self.rule("json", f"%json {text}")

    def enforceable(self, schema: Mapping[str, Any], strict: bool, field: str | None, whose: str = "") -> Schema:
        """Return a schema without the keywords that can't be enforced.

        Args:
            whose: name of the schema in messages, besides `field`.

        Raises:
            InvalidRequestError: `strict`, and the schema has such keywords. The message names them and their places.
        """
        found = EnforceableSchema(schema)
        told = [f"{field or 'schema'}: {whose}{sentence}" for sentence in found.left_out]
        if strict and told:
            raise InvalidRequestError(told[0], field=field)
        self.warnings += [one for one in told if one not in self.warnings]
        return found.schema

    def regex(self, pattern: str) -> str:
        """Return text that matches a regular expression as a whole."""
        body = _ESCAPED_OR_SPECIAL.sub(lambda m: {"/": r"\/", "\n": r"\n"}.get(m[0], m[0]), pattern)
        return self.rule("regex", f"/(?:{body})/")

    def free_text(self, end: str) -> str:
        """Return any text up to and including the literal `end`."""
        if end in self.special:
            return self.rule("text", f"{self.define('ANY', '/(?s:.)*/')} {self.literal(end)}")
        return self.rule("text", "/(?s:.)*/", f"[suffix={_quote(end)}]")

    def analysis(self) -> str:
        """Return the rule of the reasoning that harmony's models may write before they answer or call."""
        end = self.free_text("<|end|>")
        start, again = self.literal("<|channel|>analysis<|message|>"), self.literal("<|start|>assistant")
        return self.rule("analysis", f"({start} {end} {again})?")


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
