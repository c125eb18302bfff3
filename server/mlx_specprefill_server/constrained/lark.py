"""Writes grammars in llguidance's Lark dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from mlx_specprefill import InvalidRequestError

__all__ = ["Lark"]

# A model that likes whitespace could fill its whole answer with it.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
_ESCAPED_OR_SPECIAL = re.compile(r"\\.|/|\n", re.DOTALL)


class Lark:
    """A grammar being written. Methods return what other rules can refer to.

    Args:
        special: the tokenizer's added tokens: in a literal they stand for themselves, not for their spelling.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self.special = special
        self._rules: dict[str, str] = {}
        markers = sorted(filter(None, special), key=len, reverse=True)
        self._markers = re.compile(f"({'|'.join(map(re.escape, markers))})") if markers else None

    def text(self) -> str:
        """The whole grammar."""
        return "\n".join(f"{name}: {body}" for name, body in self._rules.items())

    def define(self, name: str, body: str) -> str:
        """A rule (lower case) or a terminal (upper case) of this very name."""
        self._rules[name] = body
        return name.partition("[")[0]

    def rule(self, kind: str, body: str, options: str = "") -> str:
        """A rule with a name of its own."""
        return self.define(f"{kind}_{len(self._rules)}{options}", body)

    def literal(self, text: str) -> str:
        """Exactly this text, special tokens as tokens."""
        parts = self._markers.split(text) if self._markers else [text]
        return " ".join(f"<[{self.special[p]}]>" if p in self.special else _quoted(p) for p in parts if p) or '""'

    def any_of(self, texts: Iterable[str]) -> str:
        """One of several texts, spelled out."""
        return self.rule("choice", " | ".join(_quoted(text) for text in texts))

    def json(self, schema: Mapping[str, Any], strict: bool = True, field: str | None = None) -> str:
        """JSON that meets a schema; unless `strict`, keywords that can't be enforced are ignored.

        Raises:
            InvalidRequestError: the schema is nested too deeply.
        """
        guidance = {"whitespace_pattern": _WHITESPACE, "lenient": not strict}
        try:
            text = orjson.dumps({**schema, "x-guidance": guidance}).decode()
        except TypeError as error:
            raise InvalidRequestError(f"{field}: the schema can't be read: {error}", field=field) from error
        return self.rule("json", f"%json {text}")

    def regex(self, pattern: str) -> str:
        """Text that a regular expression matches as a whole."""
        body = _ESCAPED_OR_SPECIAL.sub(lambda m: {"/": r"\/", "\n": r"\n"}.get(m[0], m[0]), pattern)
        return self.rule("regex", f"/(?:{body})/")

    def free_text(self, end: str) -> str:
        """Any text up to and with the literal `end`."""
        if end in self.special:
            return self.rule("text", f"{self.define('ANY', '/(?s:.)*/')} {self.literal(end)}")
        return self.rule("text", "/(?s:.)*/", f"[suffix={_quoted(end)}]")

    def analysis(self) -> str:
        """What harmony's models may think before they answer or call."""
        end = self.free_text("<|end|>")
        start, again = self.literal("<|channel|>analysis<|message|>"), self.literal("<|start|>assistant")
        return self.rule("analysis", f"({start} {end} {again})?")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
