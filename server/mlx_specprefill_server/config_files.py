"""Configuration files of other programs (JSON, TOML, YAML): our values go into them, and nothing else changes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, MutableMapping
from io import StringIO
from pathlib import Path
from typing import Any

import tomlkit
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from tomlkit.exceptions import TOMLKitError

from mlx_specprefill import SpecPrefillError

Values = Mapping[str, Any]
_Document = tuple[Any, Callable[[Any], str]]  # its data, and a function that serialises them


class ConfigurationError(SpecPrefillError):
    """A configuration file can't be changed. The message says why."""


def write(files: Mapping[Path, Values], defaults: Values) -> list[tuple[Path, Path | None]]:
    """Write all files, or none if `edit` refuses one. Return each changed file with the copy of its old content."""
    old = {path: path.read_bytes() if path.exists() else b"" for path in files}
    new = {path: edit(old[path], path, files[path], defaults).encode() for path in files}
    changed = [path for path in files if new[path] != old[path]]
    copies = [_replace_file(_unused_copy(path), old[path]) if old[path] else None for path in changed]
    return [(_replace_file(path, new[path]), copy) for path, copy in zip(changed, copies, strict=True)]


def edit(content: bytes, path: Path, values: Values, defaults: Values) -> str:
    """Return the content of the file with the values in it.

    Args:
        values: tables are merged with existing ones. A list of one table changes the entry of the same `name`,
            or becomes the first entry. Every other value replaces the existing one.
        defaults: further values, if the file lacks them.

    Raises:
        ConfigurationError: the content can't be read, or a part of it would be lost.
    """
    load = _FORMATS[path.suffix]
    try:
        data, dump = load(text := content.decode())
        if not isinstance(data, MutableMapping):
            raise ValueError("it is no table of settings")
        if text.strip() and "".join(dump(data).split()) != "".join(text.split()):  # white space may change
            raise ValueError("a part of it can't be written back unchanged")
        _merge(data, {name: value for name, value in defaults.items() if name not in data} | dict(values))
        is_read_again = load(dump(data))[0] == data  # tomlkit's tables have no `!=` of their own
        if not is_read_again:
            raise ValueError("the new values would change the meaning of the rest")
    except (ValueError, TOMLKitError, YAMLError) as error:
        raise ConfigurationError(f"{path} is unchanged; add the lines printed above to it: {error}") from error
    return dump(data)


def _unused_copy(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.bak{number or ''}") for number in itertools.count())
    return next(name for name in names if not name.exists())


def _replace_file(path: Path, content: bytes) -> Path:
    """Replace a file's content. Its mode stays, and a link stays a link. A new file is readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(content)
    return path


def _merge(table: Any, values: Values) -> None:
    for name, value in values.items():
        match value, table.get(name):
            case dict(), MutableMapping() as old:
                _merge(old, value)
            case [{"name": known} as entry], list() as old:
                same = [row for row in old if isinstance(row, MutableMapping) and row.get("name") == known]
                if not same:
                    old.insert(0, entry)
                for row in same:
                    _merge(row, entry)
            case dict() | [dict()], old if old is not None:
                raise ValueError(f"{name} has a value of another kind")
            case _, old if old != value:
                table[name] = value


def _toml(text: str) -> _Document:
    return tomlkit.parse(text), tomlkit.dumps


def _json(text: str) -> _Document:
    indent = re.search(r'^[ \t]+(?=")', text, re.MULTILINE)
    data = json.loads(text if text.strip() else "{}")
    return data, lambda data: json.dumps(data, indent=indent[0] if indent else 2, ensure_ascii=False) + "\n"


def _yaml(text: str) -> _Document:
    dash = re.search(r"^( *)- ", text, re.MULTILINE)
    offset = min(2, len(dash[1])) if dash else 2
    yaml = YAML()
    yaml.preserve_quotes, yaml.width = True, 1 << 20
    yaml.indent(mapping=2, sequence=offset + 2, offset=offset)

    def dump(data: Any) -> str:
        yaml.dump(data, out := StringIO())
        return out.getvalue()

    return yaml.load(text if text.strip() else "{}"), dump


_FORMATS = {".json": _json, ".jsonc": _json, ".toml": _toml, ".yaml": _yaml, ".yml": _yaml}
