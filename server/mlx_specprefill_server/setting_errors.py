"""Errors of settings, in one line that names the option or the environment variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from .settings import ENV_PREFIX, Settings

__all__ = ["NOT_SETTINGS", "flag_of", "unknown_variables", "variable", "what_is_wrong"]

NOT_SETTINGS = ["BLAS", "CONTROL", "LAUNCHED", "RANK_KEY"]  # read by the library before the settings exist
_FLAGS = {
    "admin_keys": "--admin-key",
    "allowed_hosts": "--allowed-host",
    "api_keys": "--api-key",
}
_SECRET = {"admin_keys", "api_keys"}
_WORDS = {
    "int_parsing": "is not a whole number",
    "int_type": "is not a whole number",
    "int_from_float": "is not a whole number",
    "float_parsing": "is not a number",
    "float_type": "is not a number",
    "bool_parsing": "is neither true nor false",
    "bool_type": "is neither true nor false",
    "greater_than": "has to be above {gt}",
    "greater_than_equal": "has to be {ge} or more",
    "less_than_equal": "has to be {le} or less",
    "literal_error": "has to be one of {expected}",
}


def variable(name: str) -> str:
    """Return the environment variable of setting `name`."""
    return ENV_PREFIX + name.upper()


def flag_of(name: str) -> str:
    """Return the option of `serve` for setting `name`, None if it has none."""
    return _FLAGS.get(name, "--" + name.replace("_", "-"))


def what_is_wrong(error: ValidationError, environ: Mapping[str, str] | None = None) -> str:
    """Return the first mistake: the option or variable, its value, and the fault.

    What agrees with no single setting comes without a name, since its message has it.
    """
    first: Mapping[str, Any] = error.errors()[0]
    said = str(first["msg"]).removeprefix("Value error, ")
    template = _WORDS.get(first["type"])
    if not first["loc"]:
        return said
    name, value = str(first["loc"][0]), first["input"]
    given = dict(os.environ if environ is None else environ)
    where = variable(name) if given.get(variable(name)) == value else flag_of(name)
    if name in _SECRET:
        return f"{where} {said}"
    if template is None:
        return f"{where}: {said}"
    return f"{where}: {json.dumps(value, default=str)} {template.format(**_bounds(first.get('ctx', {})))}"


def _bounds(context: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in context.items()}


def unknown_variables(environ: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Return variables that look like settings and are none, each with the nearest name, if one is near."""
    known = [name.upper() for name in Settings.model_fields] + NOT_SETTINGS
    given = {name: name.upper().removeprefix(ENV_PREFIX) for name in (os.environ if environ is None else environ)}
    strange = {name: end for name, end in sorted(given.items()) if end != name.upper() and end not in known}
    return {name: _nearest(end, known) for name, end in strange.items()}


def _nearest(end: str, known: Sequence[str]) -> str | None:
    """Return the nearest whole name. Only the part after the common beginning is compared."""
    return next((ENV_PREFIX + near for near in get_close_matches(end, known, 1)), None)
