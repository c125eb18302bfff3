"""Parses single values that pydantic has no type for: shares, texts, stop strings, biases of tokens."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from mlx_specprefill import keep_pct

INT64 = 2**63
MAX_STOPS = 64


def whole(value: Any) -> Any:
    """Return 16 for 16.0, which some clients write."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < INT64 else value


def no_nulls(body: Any) -> Any:
    return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body


def keep(value: Any) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number in (0, 1]")
    return keep_pct(value)


def texts(value: Any) -> dict[str, str]:
    """Check a list of texts. pydantic alone would make an error for each wrong member."""
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("must be an object whose values are strings")
    return value


def logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise ValueError(f"{token!r:.40} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {token} must be a number from -100 to 100")
    return {int(token): float(bias) for token, bias in value.items()}


def stops(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(stop, str) and stop for stop in value):
        raise ValueError("must be an array of non-empty strings")
    if len(value) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings are supported")
    return tuple(value)


def listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value
