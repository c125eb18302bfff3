"""The agents that can be set up: which files they read, and what has to be in them.

Every setting was run with the version that docs/clients names, but for Zed and Open WebUI, which need a screen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .files import Format
from .running import RunningServer
from .values import Default, Entry, Values

__all__ = ["AGENTS", "MOVED_BY", "Agent", "File", "Setup"]

MOVED_BY = ("CODEX_HOME", "XDG_CONFIG_HOME", "CLAUDE_CONFIG_DIR", "QWEN_HOME", "CLINE_DATA_DIR", "CONTINUE_GLOBAL_DIR")

_ID = "mlx-specprefill"  # of our entry among an agent's providers
_KEY_VARIABLE = "MLX_SPECPREFILL_API_KEY"
_PATIENCE_S = 3000  # a long prompt on a slow machine


@dataclass(frozen=True, slots=True)
class File:
    """A configuration file and what it has to say."""

    path: Path
    format: Format
    values: Values


@dataclass(frozen=True, slots=True)
class Setup:
    """What connects one agent with one server.

    Attributes:
        files: none where the agent keeps its settings elsewhere.
        environment: variables that it has to be started with.
        notes: sentences for its user.
    """

    files: tuple[File, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent.

    Attributes:
        first_prompt: tokens of its own first prompt, roughly; the window has to be a good deal larger.
    """

    title: str
    first_prompt: int
    setup: Callable[[RunningServer], Setup]


def _home(variable: str, *default: str) -> Path:
    """A folder of the user's, which an environment variable may move."""
    moved = os.environ.get(variable)
    return Path(moved).expanduser() if moved else Path.home().joinpath(*default)


def _codex(server: RunningServer) -> Setup:
    provider: dict[str, Any] = {
        "name": _ID,
        "base_url": server.v1,
        "wire_api": "responses",
        "stream_idle_timeout_ms": _PATIENCE_S * 1000,
    }
    if server.key:
        provider["experimental_bearer_token"] = server.key
    values = {
        "model": server.model,
        "model_provider": _ID,
        "model_context_window": server.window,
        "model_providers": {_ID: provider},
    }
    return Setup(
        (File(_home("CODEX_HOME", ".codex") / "config.toml", "toml", values),),
        notes=("Codex says at its start that it does not know the model; the window above is what it goes by.",),
    )


def _opencode(server: RunningServer) -> Setup:
    options: dict[str, Any] = {"baseURL": server.v1, "headerTimeout": _PATIENCE_S * 1000}
    options |= {"chunkTimeout": _PATIENCE_S * 1000} | ({"apiKey": server.key} if server.key else {})
    model = {"name": server.model, "limit": {"context": server.window, "output": server.output}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": _ID, "options": options, "models": {server.model: model}}
    chosen = f"{_ID}/{server.model}"
    values = {
        "$schema": Default("https://opencode.ai/config.json"),
        "provider": {_ID: provider},
        "model": chosen,
        "small_model": chosen,
    }
    folder = _home("XDG_CONFIG_HOME", ".config") / "opencode"
    commented = folder / "opencode.jsonc"
    path = commented if commented.exists() else folder / "opencode.json"
    return Setup((File(path, "json", values),))


def _claude(server: RunningServer) -> Setup:
    environment = {
        "ANTHROPIC_BASE_URL": server.base,
        "ANTHROPIC_AUTH_TOKEN": server.shown_key,
        "ANTHROPIC_MODEL": server.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": server.model,
        "API_TIMEOUT_MS": str(_PATIENCE_S * 1000),
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(_PATIENCE_S * 1000),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.window),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.output),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return Setup((File(_home("CLAUDE_CONFIG_DIR", ".claude") / "settings.json", "json", {"env": environment}),))


def _qwen(server: RunningServer) -> Setup:
    generation = {"timeout": _PATIENCE_S * 1000, "contextWindowSize": server.window}
    model = {
        "id": server.model,
        "name": _ID,
        "envKey": _KEY_VARIABLE,
        "baseUrl": server.v1,
        "generationConfig": generation,
    }
    values = {
        "env": {_KEY_VARIABLE: server.shown_key},
        "modelProviders": {"openai": Entry(model, ("name",))},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": server.model},
    }
    return Setup((File(_home("QWEN_HOME", ".qwen") / "settings.json", "json", values),))


def _cline(server: RunningServer) -> Setup:
    settings = {
        "provider": "openai-compatible",
        "apiKey": server.shown_key,
        "model": server.model,
        "baseUrl": server.v1,
        "contextWindow": server.window,
        "maxTokens": server.output,
        "timeout": _PATIENCE_S * 1000,
    }
    # A date is required.
    entry = {"settings": settings, "updatedAt": Default(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.000Z}")}
    values = {
        "version": Default(1),
        "lastUsedProvider": "openai-compatible",
        "modes": Default({}),
        "providers": {"openai-compatible": entry | {"tokenSource": "manual"}},
    }
    path = _home("CLINE_DATA_DIR", ".cline", "data") / "settings" / "providers.json"
    return Setup(
        (File(path, "json", values),),
        notes=(
            "This is the file of the Cline CLI. In the editor, choose the provider OpenAI Compatible and enter these.",
        ),
    )


def _continue(server: RunningServer) -> Setup:
    model = {
        "name": _ID,
        "provider": "openai",
        "model": server.model,
        "apiBase": server.v1,
        "apiKey": server.shown_key,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {"contextLength": server.window, "maxTokens": server.output},
    }
    values = {
        "name": Default("local"),
        "version": Default("1.0.0"),
        "schema": Default("v1"),
        "models": Entry(model, ("name",)),
    }
    path = _home("CONTINUE_GLOBAL_DIR", ".continue") / "config.yaml"
    return Setup((File(path, "yaml", values),), notes=(f"The CLI reads it with `cn --config {path}`.",))


def _aider(server: RunningServer) -> Setup:
    name = f"openai/{server.model}"
    values = {
        "model": name,
        "openai-api-base": server.v1,
        "openai-api-key": server.shown_key,
        "timeout": _PATIENCE_S,
        "show-model-warnings": False,
    }
    limits = {"max_input_tokens": server.window, "max_output_tokens": server.output, "max_tokens": server.output}
    metadata = {name: limits | {"litellm_provider": "openai", "mode": "chat"}}
    home = Path.home()
    return Setup(
        (
            File(home / ".aider.conf.yml", "yaml", values),
            File(home / ".aider.model.metadata.json", "json", metadata),
        )
    )


def _zed(server: RunningServer) -> Setup:
    model = {
        "name": server.model,
        "display_name": f"{server.model} ({_ID})",
        "max_tokens": server.window,
        "max_output_tokens": server.output,
        "capabilities": {"tools": True, "images": False, "parallel_tool_calls": True, "prompt_cache_key": False},
    }
    provider = {"api_url": server.v1, "available_models": [model]}
    values = {
        "language_models": {"openai_compatible": {_ID: provider}},
        "agent": {"default_model": {"provider": _ID, "model": server.model}},
    }
    return Setup(
        (File(_home("XDG_CONFIG_HOME", ".config") / "zed" / "settings.json", "json", values),),
        {_KEY_VARIABLE: server.shown_key},
        ("Zed keeps keys apart: start it with this variable, or enter the key in Agent Settings, LLM Providers.",),
    )


def _open_webui(server: RunningServer) -> Setup:
    environment = {
        "ENABLE_OLLAMA_API": "False",
        "OPENAI_API_BASE_URL": server.v1,
        "OPENAI_API_KEY": server.shown_key,
        "AIOHTTP_CLIENT_TIMEOUT": str(_PATIENCE_S),
    }
    return Setup(
        environment=environment,
        notes=(
            "Open WebUI takes these variables at its first start and keeps connections in its database from then on.",
            "Later: Admin Panel, Settings, Connections, OpenAI API, with the same address and key.",
            "In a container the address is not 127.0.0.1: serve with --host and --api-key, and use the host's address.",
        ),
    )


AGENTS: Mapping[str, Agent] = {
    "codex": Agent("Codex CLI", 10_000, _codex),
    "opencode": Agent("opencode", 10_000, _opencode),
    "claude": Agent("Claude Code", 20_000, _claude),
    "qwen": Agent("Qwen-Code", 15_000, _qwen),
    "cline": Agent("Cline CLI", 5_000, _cline),
    "continue": Agent("Continue", 5_000, _continue),
    "aider": Agent("aider", 3_000, _aider),
    "zed": Agent("Zed", 5_000, _zed),
    "open-webui": Agent("Open WebUI", 0, _open_webui),
}
