"""`models.toml`: the models of one server, in the format of the pairs file; the first one is the default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..pair_loading import make_settings
from ..pairs import PairsError, Row, read_pairs
from .entry import Entry

__all__ = ["entries_of", "models_file", "read_table"]


def models_file() -> Path:
    """Return the path of the default table."""
    config = os.environ.get("XDG_CONFIG_HOME")
    return (Path(config) if config else Path.home() / ".config") / "mlx-specprefill" / "models.toml"


def read_table(file: Path) -> dict[str, Row]:
    """Return the rows of a table by name.

    Raises:
        PairsError: no such file, no model in it, or a row that can't be understood.
    """
    rows = read_pairs(file)
    if not rows:
        raise PairsError(f"{file} names no model")
    return rows


def entries_of(rows: Mapping[str, Row], file: Path, given: Mapping[str, Any]) -> list[Entry]:
    """Return the models with their settings. Shared settings come first, then the environment, then the model's row.

    Raises:
        PairsError: two models have the same id or alias.
    """
    entries = [_entry(name, row, given) for name, row in rows.items()]
    names: dict[str, str] = {}
    for entry in entries:
        for name in (entry.id, *entry.aliases):
            if names.setdefault(name, entry.name) != entry.name:
                raise PairsError(f"{file}: [{names[name]}] and [{entry.name}] are both called {name!r}")
    return entries


def _entry(name: str, row: Row, given: Mapping[str, Any]) -> Entry:
    alias = row.alias or name
    settings = make_settings(row.model_copy(update={"alias": alias}), **{**given, "model_alias": None})
    return Entry(alias, settings, name=name, aliases=tuple(row.aliases), pin=row.pin, ttl=row.ttl)
