"""The known agents: their configuration files and the required values.

Libraries put our values into a file and keep the rest; a file that would lose something stays unchanged. Every setting
was run with the version that docs/clients names, except Zed and Open WebUI, which need a screen.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
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

_ID = "mlx-specprefill"  # the id of our entry among an agent's providers
_KEY_VARIABLE = "MLX_SPECPREFILL_API_KEY"
_PATIENCE_MS = 3_000_000  # milliseconds, for a long prompt on a slow machine
_MOST_OUTPUT = 8192  # tokens; agents plan their compaction by it


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


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A running server: its address (without /v1), its model, the model's window in tokens, and a key.

    Attributes:
        tools: the model's chat template has a place for tools.
    """

    base: str
    model: str
    window: int
    key: str
    tools: bool = True

    @property
    def v1(self) -> str:
        return f"{self.base}/v1"

    @property
    def output(self) -> int:
        """Return the tokens that an agent should leave for an answer. The server itself takes any number."""
        return min(_MOST_OUTPUT, self.window // 4)


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings that connect one agent to one server.

    Attributes:
        files: required values of each file; none if the agent keeps its settings elsewhere.
        environment: variables for its start.
        notes: sentences for its user.
        defaults: further values, for a file that lacks them.
    """

    files: Mapping[Path, Values] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    defaults: Values = field(default_factory=dict)


def _home(variable: str, *default: str) -> Path:
    """Return a folder of the user's, which an environment variable may move."""
    moved = os.environ.get(variable)
    return Path(moved).expanduser() if moved else Path.home().joinpath(*default)


def _codex(server: RunningServer) -> Setup:
    provider = {
        "name": _ID,
        "base_url": server.v1,
        "wire_api": "responses",
        "stream_idle_timeout_ms": _PATIENCE_MS,
        "experimental_bearer_token": server.key,
    }
    values = {
        "model": server.model,
        "model_provider": _ID,
        "model_context_window": server.window,
        "model_providers": {_ID: provider},
    }
    note = "Codex says at its start that it does not know the model; the window above is what it goes by."
    return Setup({_home("CODEX_HOME", ".codex") / "config.toml": values}, notes=(note,))


def _opencode(server: RunningServer) -> Setup:
    wait = {"headerTimeout": _PATIENCE_MS, "chunkTimeout": _PATIENCE_MS}
    options = {"baseURL": server.v1, "apiKey": server.key, **wait}
    model = {"name": server.model, "limit": {"context": server.window, "output": server.output}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": _ID, "options": options, "models": {server.model: model}}
    chosen = f"{_ID}/{server.model}"
    values = {"provider": {_ID: provider}, "model": chosen, "small_model": chosen}
    folder = _home("XDG_CONFIG_HOME", ".config") / "opencode"
    commented = folder / "opencode.jsonc"
    path = commented if commented.exists() else folder / "opencode.json"
    return Setup({path: values}, defaults={"$schema": "https://opencode.ai/config.json"})


def _claude(server: RunningServer) -> Setup:
    environment = {
        "ANTHROPIC_BASE_URL": server.base,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "ANTHROPIC_MODEL": server.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": server.model,
        "API_TIMEOUT_MS": str(_PATIENCE_MS),
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(_PATIENCE_MS),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.window),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.output),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it changes from session to session
    }
    return Setup({_home("CLAUDE_CONFIG_DIR", ".claude") / "settings.json": {"env": environment}})


def _qwen(server: RunningServer) -> Setup:
    model = {
        "id": server.model,
        "name": _ID,
        "envKey": _KEY_VARIABLE,
        "baseUrl": server.v1,
        "generationConfig": {"timeout": _PATIENCE_MS, "contextWindowSize": server.window},
    }
    values = {
        "env": {_KEY_VARIABLE: server.key},
        "modelProviders": {"openai": [model]},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": server.model},
    }
    return Setup({_home("QWEN_HOME", ".qwen") / "settings.json": values})


def _cline(server: RunningServer) -> Setup:
    settings = {
        "provider": "openai-compatible",
        "apiKey": server.key,
        "model": server.model,
        "baseUrl": server.v1,
        "contextWindow": server.window,
        "maxTokens": server.output,
        "timeout": _PATIENCE_MS,
    }
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.000Z}"  # a required field
    provider = {"settings": settings, "updatedAt": now, "tokenSource": "manual"}
    values = {"lastUsedProvider": "openai-compatible", "providers": {"openai-compatible": provider}}
    path = _home("CLINE_DATA_DIR", ".cline", "data") / "settings" / "providers.json"
    note = "This is the file of the Cline CLI. In the editor, choose the provider OpenAI Compatible and enter these."
    return Setup({path: values}, notes=(note,), defaults={"version": 1, "modes": {}})


def _continue(server: RunningServer) -> Setup:
    model = {
        "name": _ID,
        "provider": "openai",
        "model": server.model,
        "apiBase": server.v1,
        "apiKey": server.key,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {"contextLength": server.window, "maxTokens": server.output},
    }
    path = _home("CONTINUE_GLOBAL_DIR", ".continue") / "config.yaml"
    note = f"The CLI reads it with `cn --config {path}`."
    defaults = {"name": "local", "version": "1.0.0", "schema": "v1"}
    return Setup({path: {"models": [model]}}, notes=(note,), defaults=defaults)


def _aider(server: RunningServer) -> Setup:
    name = f"openai/{server.model}"
    values = {
        "model": name,
        "openai-api-base": server.v1,
        "openai-api-key": server.key,
        "timeout": _PATIENCE_MS // 1000,
        "show-model-warnings": False,
    }
    limits = {"max_input_tokens": server.window, "max_output_tokens": server.output, "max_tokens": server.output}
    metadata = {name: limits | {"litellm_provider": "openai", "mode": "chat"}}
    return Setup({Path.home() / ".aider.conf.yml": values, Path.home() / ".aider.model.metadata.json": metadata})


def _zed(server: RunningServer) -> Setup:
    model = {
        "name": server.model,
        "display_name": f"{server.model} ({_ID})",
        "max_tokens": server.window,
        "max_output_tokens": server.output,
        "capabilities": {"tools": True, "images": False, "parallel_tool_calls": True, "prompt_cache_key": False},
    }
    values = {
        "language_models": {"openai_compatible": {_ID: {"api_url": server.v1, "available_models": [model]}}},
        "agent": {"default_model": {"provider": _ID, "model": server.model}},
    }
    path = _home("XDG_CONFIG_HOME", ".config") / "zed" / "settings.json"
    note = "Zed keeps keys apart: start it with this variable, or enter the key in Agent Settings, LLM Providers."
    return Setup({path: values}, {_KEY_VARIABLE: server.key}, (note,))


def _open_webui(server: RunningServer) -> Setup:
    environment = {
        "ENABLE_OLLAMA_API": "False",
        "OPENAI_API_BASE_URL": server.v1,
        "OPENAI_API_KEY": server.key,
        "AIOHTTP_CLIENT_TIMEOUT": str(_PATIENCE_MS // 1000),
    }
    return Setup(
        environment=environment,
        notes=(
            "Open WebUI takes these variables at its first start and keeps connections in its database from then on.",
            "Later: Admin Panel, Settings, Connections, OpenAI API, with the same address and key.",
            "In a container the address is not 127.0.0.1: serve with --host and --api-key, and use the host's address.",
        ),
    )


def any_other(server: RunningServer) -> Setup:
    """Return the address, the key and the model for an agent that is not known here."""
    environment = {"OPENAI_BASE_URL": server.v1, "OPENAI_API_KEY": server.key, "OPENAI_MODEL": server.model}
    note = f"No such agent is known here, only {', '.join(AGENTS)}. Enter this address, key and model in its settings."
    return Setup(environment=environment, notes=(note,))


AGENTS: Mapping[str, Callable[[RunningServer], Setup]] = {
    "codex": _codex,
    "opencode": _opencode,
    "claude": _claude,
    "qwen": _qwen,
    "cline": _cline,
    "continue": _continue,
    "aider": _aider,
    "zed": _zed,
    "open-webui": _open_webui,
}
