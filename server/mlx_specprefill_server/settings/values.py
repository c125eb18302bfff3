"""Values of settings as people write them: sizes such as 512MB, lists with commas, keys that must not be empty."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

from pydantic import SecretStr

UNITS = ("", "k", "m", "g", "t")
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
# arguments of apply_chat_template and render_jinja_template themselves
_RESERVED = {
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "conversations", "documents",
    "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
    "sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation",
}  # fmt: skip


def split_list(value: Any) -> Any:
    """Return two entries for `a,b` from the environment."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def keys(value: Any) -> Any:
    """Return the keys of a list or of `a,b`. An empty one would let everybody in: it comes from an unset variable."""
    given = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    texts = [key.get_secret_value() if isinstance(key, SecretStr) else key for key in given]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError("an API key must not be empty; is the variable set that it was taken from?")
    return tuple(given)


def refused_name(names: Iterable[str]) -> str | None:
    """Return the first name that no template's argument can have, None if there is none."""
    return next((name for name in names if name in _RESERVED or not name.isidentifier()), None)


def template_kwargs(value: Any) -> Any:
    """Return the arguments of a chat template in a JSON object."""
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f'a JSON object such as {{"enable_thinking": false}} is expected: {error}') from None
    if not isinstance(given, dict):
        raise ValueError(f'a JSON object such as {{"enable_thinking": false}} is expected, got {value!r:.80}')
    if (name := refused_name(given)) is not None:
        raise ValueError(f"{name!r:.80} is no argument that can be set")
    return given


def size(value: Any) -> Any:
    """Return the bytes of `512MB`, `1.5 GiB`, `2g` or a number. KB is 1024 bytes like KiB: memory sizes are meant."""
    if not isinstance(value, str):
        return value
    parts = SIZE.fullmatch(value.strip())
    if parts is None:
        raise ValueError(f"a size such as 512MB or 2GB is expected, got {value!r}")
    return int(Fraction(parts[1]) * 1024 ** UNITS.index(parts[2].lower()))
