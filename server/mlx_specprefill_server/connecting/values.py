"""What a configuration file is to say, whatever its format: values that are merged into those that it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_specprefill import SpecPrefillError

__all__ = ["ConfigurationError", "Default", "Entry", "Values", "merged", "plain"]

Values = Mapping[str, Any]  # mappings are merged, Default and Entry are special, everything else replaces what is there


class ConfigurationError(SpecPrefillError):
    """A configuration file that is left as it is, and why."""


@dataclass(frozen=True, slots=True)
class Default:
    """A value that is written only where there is none."""

    value: Any


@dataclass(frozen=True, slots=True)
class Entry:
    """The first entry of a list. One with the same values under `names` is replaced."""

    value: Mapping[str, Any]
    names: tuple[str, ...]

    def place(self, entries: Sequence[Any]) -> int | None:
        """Which of them it replaces; None: it is new."""
        for index, entry in enumerate(entries):
            if isinstance(entry, Mapping) and all(entry.get(name) == self.value[name] for name in self.names):
                return index
        return None


def merged(data: Mapping[str, Any], values: Values, path: str = "") -> dict[str, Any]:
    """The data of a file with the values in it.

    Raises:
        ConfigurationError: the file has something of another kind at a place where a table or a list is needed.
    """
    out = dict(data)
    for name, value in values.items():
        out[name] = _merged_value(out.get(name), name in out, value, f"{path}{name}")
    return out


def plain(values: Values) -> dict[str, Any]:
    """What a file says that has nothing else."""
    return merged({}, values)


def _merged_value(old: Any, there: bool, new: Any, path: str) -> Any:
    match new:
        case Default():
            return old if there else new.value
        case Entry():
            return _with_entry(old or [], new, path)
        case Mapping():
            if there and not isinstance(old, Mapping):
                raise ConfigurationError(f"{path} is no table of settings")
            return merged(old or {}, new, f"{path}.")
    return new


def _with_entry(entries: Any, entry: Entry, path: str) -> list[Any]:
    if not isinstance(entries, list):
        raise ConfigurationError(f"{path} is no list")
    place = entry.place(entries)
    if place is None:
        return [dict(entry.value), *entries]
    return [*entries[:place], dict(entry.value), *entries[place + 1 :]]
