"""One configuration file in one of three formats: what it says, and the same with our values in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from . import json_files, toml_files, yaml_files
from .values import ConfigurationError, Values, merged, plain

__all__ = ["Format", "check", "edited", "snippet"]

Format = Literal["json", "toml", "yaml"]


class _Kind(Protocol):
    """What each format's module has."""

    def data_of(self, text: str, /) -> dict[str, Any]: ...
    def written(self, data: Mapping[str, Any], /) -> str: ...
    def changed(self, text: str, values: Values, /) -> str: ...


_FORMATS: dict[Format, _Kind] = {"json": json_files, "toml": toml_files, "yaml": yaml_files}


def snippet(values: Values, format: Format) -> str:
    """A file that says this and nothing else."""
    return _FORMATS[format].written(plain(values))


def check(text: str, format: Format) -> None:
    """Raises ConfigurationError: the text is not of this format."""
    _FORMATS[format].data_of(text)


def edited(text: str, values: Values, format: Format) -> str:
    """The text with the values in it, its comments and everything else as they were.

    Raises:
        ConfigurationError: the text can't be read, or not be changed without harm.
    """
    kind = _FORMATS[format]
    expected = merged(kind.data_of(text), values)
    new = kind.changed(text, values)
    if kind.data_of(new) != expected:
        raise ConfigurationError("it is written in a way that can't be changed automatically")
    return new
