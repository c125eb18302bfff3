"""TOML files, changed without touching the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomlkit
from tomlkit.exceptions import ParseError

from .values import ConfigurationError, Default, Entry, Values

__all__ = ["changed", "data_of", "written"]


def data_of(text: str) -> dict[str, Any]:
    """What the file says.

    Raises:
        ConfigurationError: it is no TOML.
    """
    return dict(_parsed(text).unwrap())


def written(data: Mapping[str, Any]) -> str:
    """A whole file."""
    return changed("", data)


def changed(text: str, values: Values) -> str:
    """The text with the values in it.

    Raises:
        ConfigurationError: as `data_of`.
    """
    document = _parsed(text)
    _set(document, values)
    return document.as_string()


def _parsed(text: str) -> tomlkit.TOMLDocument:
    try:
        return tomlkit.parse(text)
    except ParseError as error:
        raise ConfigurationError(f"it is no TOML: {error}") from error


def _set(table: Any, values: Values) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping):
            if name not in table:
                table[name] = tomlkit.table(is_super_table=all(isinstance(v, Mapping) for v in value.values()))
            _set(table[name], value)
        elif isinstance(value, Entry):
            raise ConfigurationError(f"{name}: entries of lists can't be changed in TOML")
        elif isinstance(value, Default):
            table.setdefault(name, value.value)
        elif table.get(name) != value:
            table[name] = value
