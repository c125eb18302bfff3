"""Limits of a text as regular expressions that it matches as a whole, for notations without JSON's quotes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..schemas import Schema

ANY = "(?s:.)*"
_PIECES = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]?|.", re.DOTALL)
_ESCAPES = re.compile(r"\\.", re.DOTALL)
_CLASSES = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}  # ASCII in JSON schemas (ECMA-262), Unicode in the grammar library
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DAY = "0[1-9]|1[0-9]|2[0-8]"  # of any month: a grammar can't count those of February
_DATE = f"[0-9]{{4}}-((0[1-9]|1[0-2])-({_DAY})|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
# Narrower than the standards where that is simpler. Source: RFC 3339, 5321, 1123, 2673, 4122, 3986.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,31}})?@{_LABEL}(\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]{0,31}:[A-Za-z0-9._~:/?#@!$&'()*+,;=%-]+",
    "unknown": ANY,
}


def limits(schema: Schema) -> Iterator[tuple[str, str | None]]:
    """Yield the words of a schema that limit a text, each with its regular expression, None where there is none."""
    if isinstance(pattern := schema.get("pattern"), str):
        yield "pattern", whole(pattern)
    if isinstance(name := schema.get("format"), str):
        yield "format", FORMATS.get(name)
    least, most = schema.get("minLength"), schema.get("maxLength")
    if isinstance(least, int) and least > 0:
        yield "minLength", f"(?s:.){{{least},}}"
    if isinstance(most, int):
        yield "maxLength", f"(?s:.){{0,{most}}}"


def ascii_classes(pattern: str) -> str:
    r"""Return the same expression with \d and \w written out."""
    return "".join(map(_ascii, _PIECES.findall(pattern)))


def _ascii(piece: str) -> str:
    if piece.startswith("["):
        return _ESCAPES.sub(lambda m: _CLASSES.get(m[0], m[0]), piece)
    if piece.startswith("\\") and piece.lower() in _CLASSES:
        return f"[{'^' if piece.isupper() else ''}{_CLASSES[piece.lower()]}]"
    return piece


def whole(pattern: str) -> str | None:
    """Return the expression that a whole text matches if a part of it matches `pattern`, None where an anchor stands
    elsewhere than at an end.
    """
    choices: list[list[str]] = [[]]
    depth = 0
    for piece in _PIECES.findall(pattern):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            choices.append([])
        else:
            choices[-1].append(piece)
    found = [_whole(pieces) for pieces in choices]
    return None if None in found else "|".join(text for text in found if text is not None)


def _whole(pieces: list[str]) -> str | None:
    begins, ends = pieces[:1] == ["^"], pieces[-1:] == ["$"]
    body = pieces[begins : len(pieces) - ends]
    if "^" in body or "$" in body:
        return None
    return f"{'' if begins else ANY}(?:{''.join(body)}){'' if ends else ANY}"
