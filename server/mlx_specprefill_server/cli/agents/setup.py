"""The agents that `launch` starts and `connect` knows: variables, command lines, and the text of configuration files.

Those in a terminal were run with the version that docs/clients names. Editors and their like need a screen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ...settings.server import API_KEY_VARIABLE

_ID = "mlx-specprefill"  # the id of our entry among an agent's providers
_PATIENCE_MS = 3_000_000  # milliseconds, for a long prompt on a slow machine
_MOST_OUTPUT = 8192  # tokens; agents plan their compaction by it
_CODEX_INSTRUCTIONS = """You are a coding agent in the Codex CLI, on the user's own machine.
Work until the task is done: look at the files that it concerns, change them, and run what shows that it is right.
Keep to the task and to the style of the code around it. Say in one sentence before a call what it is for, and in a
few at the end what you changed. Don't commit, and don't undo changes of the user's, unless you are asked to.

Edit files with apply_patch. Its input is a patch of this form:
*** Begin Patch
*** Update File: path/of/file.py
@@ def name_of_the_function():
 a line of context
-a line to be removed
+a line to be added
*** Add File: path/of/new_file.py
+each line of it
*** Delete File: path/of/old_file.py
*** End Patch
Paths are relative. Give three lines of context above and below each change."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A running server: its address (without /v1), its model, the model's window in tokens, and a key.

    Attributes:
        tools: the model's chat template has a place for tools.
        folder: ours, for what agents that are launched read.
    """

    base: str
    model: str
    window: int
    key: str
    tools: bool = True
    folder: str = field(default_factory=lambda: str(Path.home() / ".cache" / _ID / "agents"))

    @property
    def v1(self) -> str:
        return f"{self.base}/v1"

    def file(self, name: str) -> str:
        """Return the path of an agent's file of that name, one for each port."""
        return f"{self.folder}/{urlsplit(self.base).port or 80}/{name}"

    @property
    def output(self) -> int:
        """Return the tokens that an agent should leave for an answer. The server itself takes any number."""
        return min(_MOST_OUTPUT, self.window // 4)


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings that connect one agent to one server.

    Attributes:
        files: text for each file by its path: in our folder if the agent can be launched, else its usual one.
        environment: variables for its start.
        notes: sentences for its user.
        command: starts the agent, and nothing of the user's has to be changed; empty: it can't be launched so.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


def _json(values: Any) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _lines(values: Mapping[str, Any], sign: str) -> str:
    """Return a line for each value: of TOML with the sign ` = `, of YAML with `: `. Both take JSON's strings."""
    return "".join(f"{name}{sign}{json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items())


def _codex(server: RunningServer) -> Setup:
    provider = {
        "name": _ID,
        "base_url": server.v1,
        "wire_api": "responses",
        "stream_idle_timeout_ms": _PATIENCE_MS,
        "env_key": API_KEY_VARIABLE,
    }
    catalogue = server.file("codex.json")  # all that Codex knows of models, and of its tools for them
    table = _lines(provider, " = ").rstrip().replace("\n", ", ")
    values = {
        "model": json.dumps(server.model, ensure_ascii=False),
        "model_provider": json.dumps(_ID),
        "model_catalog_json": json.dumps(catalogue),
        "model_context_window": server.window,
        f"model_providers.{_ID}": f"{{{table}}}",
    }
    overrides = (word for name, value in values.items() for word in ("-c", f"{name}={value}"))
    models = _json({"models": [_codex_model(server)]})
    return Setup({catalogue: models}, {API_KEY_VARIABLE: server.key}, command=("codex", *overrides))


def _codex_model(server: RunningServer) -> dict[str, Any]:
    """Return an entry of Codex's catalogue: it has apply_patch and the search for tools for models in there only."""
    return {
        "name": _ID,  # means nothing to Codex
        "slug": server.model,
        "display_name": server.model,
        "base_instructions": _CODEX_INSTRUCTIONS,
        "apply_patch_tool_type": "freeform",
        "supports_search_tool": True,
        "shell_type": "unified_exec",
        "context_window": server.window,
        "max_context_window": server.window,
        "truncation_policy": {"mode": "tokens", "limit": 10_000},
        "input_modalities": ["text"],
        "supported_reasoning_levels": [],
        "support_verbosity": False,
        "experimental_supported_tools": [],
        "supported_in_api": True,
        "visibility": "list",
        "priority": 0,
    }


def _opencode(server: RunningServer) -> Setup:
    wait = {"headerTimeout": _PATIENCE_MS, "chunkTimeout": _PATIENCE_MS}
    options = {"baseURL": server.v1, "apiKey": server.key, **wait}
    model = {"name": server.model, "limit": {"context": server.window, "output": server.output}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": _ID, "options": options, "models": {server.model: model}}
    chosen = f"{_ID}/{server.model}"
    values = {"provider": {_ID: provider}, "model": chosen, "small_model": chosen}
    environment = {"OPENCODE_CONFIG_CONTENT": json.dumps(values, ensure_ascii=False)}
    return Setup(environment=environment, command=("opencode",))


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
        "ENABLE_TOOL_SEARCH": "true",  # off for other hosts than Anthropic's, to which it sends every schema
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it changes from session to session
        "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",  # a countdown behind every result
    }
    note = (
        "CLAUDE_CODE_DISABLE_AUTO_MEMORY=1 turns its memory of folders off. The path of that memory is in front of all "
        "tools. Without the memory, most of the first prompt of another folder is cached, with it next to nothing."
    )
    return Setup(environment=environment, notes=(note,), command=("claude",))


def _qwen(server: RunningServer) -> Setup:
    model = {
        "id": server.model,
        "name": _ID,
        "envKey": API_KEY_VARIABLE,
        "baseUrl": server.v1,
        "generationConfig": {"timeout": _PATIENCE_MS, "contextWindowSize": server.window},
    }
    values = {
        "modelProviders": {"openai": [model]},
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": server.model},
    }
    path = server.file("qwen.json")
    environment = {"QWEN_CODE_SYSTEM_SETTINGS_PATH": path, API_KEY_VARIABLE: server.key}
    return Setup({path: _json(values)}, environment, command=("qwen",))


def _pi(server: RunningServer) -> Setup:
    model = {
        "id": server.model,
        "name": server.model,
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": server.window,
        "maxTokens": server.output,
        "compat": {"supportsStore": False, "supportsDeveloperRole": False},
    }
    provider = {"baseUrl": server.v1, "apiKey": server.key, "api": "openai-completions", "models": [model]}
    path = server.file("pi.ts")
    extension = f"export default (pi) => pi.registerProvider({json.dumps(_ID)}, {_json(provider).rstrip()});\n"
    return Setup({path: extension}, command=("pi", "--extension", path, "--provider", _ID, "--model", server.model))


def _vscode(server: RunningServer) -> Setup:
    model = {
        "id": server.model,
        "name": server.model,
        "url": f"{server.v1}/chat/completions",
        "toolCalling": server.tools,
        "vision": False,
        "maxInputTokens": server.window - server.output,
        "maxOutputTokens": server.output,
    }
    group = {"name": _ID, "vendor": "customendpoint", "apiKey": server.key, "apiType": "chat-completions"}
    note = "Chat: Manage Language Models, Add Models, Custom Endpoint opens this file. On Linux it is in ~/.config."
    path = "~/Library/Application Support/Code/User/chatLanguageModels.json"
    return Setup({path: _json([group | {"models": [model]}])}, notes=(note,))


def _hermes(server: RunningServer) -> Setup:
    values = {
        "provider": "custom",
        "base_url": server.v1,
        "default": server.model,
        "api_key": server.key,
        "context_length": server.window,
    }
    text = _lines(values, ": ").rstrip().replace("\n", "\n  ")
    return Setup({"~/.hermes/config.yaml": f"model:\n  {text}\n"})


def _openclaw(server: RunningServer) -> Setup:
    model = {
        "id": server.model,
        "name": server.model,
        "input": ["text"],
        "contextWindow": server.window,
        "maxTokens": server.output,
    }
    provider = {"baseUrl": server.v1, "api": "openai-completions", "apiKey": server.key, "models": [model]}
    values = {
        "models": {"providers": {_ID: provider}},
        "agents": {"defaults": {"model": {"primary": f"{_ID}/{server.model}"}}},
    }
    return Setup({"~/.openclaw/openclaw.json": _json(values)})


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
    providers = {"openai-compatible": provider}
    values = {"version": 1, "modes": {}, "lastUsedProvider": "openai-compatible", "providers": providers}
    note = "This is the file of the Cline CLI. In the editor, choose the provider OpenAI Compatible and enter these."
    return Setup({"~/.cline/data/settings/providers.json": _json(values)}, notes=(note,))


def _continue(server: RunningServer) -> Setup:
    model = {
        "name": _ID,
        "provider": "openai",
        "model": server.model,
        "apiBase": server.v1,
        "apiKey": server.key,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"] if server.tools else [],
        "defaultCompletionOptions": {"contextLength": server.window, "maxTokens": server.output},
    }
    path = "~/.continue/config.yaml"
    note = f"The CLI reads it with `cn --config {path}`."
    head = _lines({"name": "local", "version": "1.0.0", "schema": "v1"}, ": ")
    entry = _lines(model, ": ").rstrip().replace("\n", "\n    ")
    return Setup({path: f"{head}models:\n  - {entry}\n"}, notes=(note,))


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
    metadata = _json({name: limits | {"litellm_provider": "openai", "mode": "chat"}})
    return Setup({"~/.aider.conf.yml": _lines(values, ": "), "~/.aider.model.metadata.json": metadata})


def _zed(server: RunningServer) -> Setup:
    tools = server.tools
    model = {
        "name": server.model,
        "display_name": f"{server.model} ({_ID})",
        "max_tokens": server.window,
        "max_output_tokens": server.output,
        "capabilities": {"tools": tools, "images": False, "parallel_tool_calls": tools, "prompt_cache_key": False},
    }
    values = {
        "language_models": {"openai_compatible": {_ID: {"api_url": server.v1, "available_models": [model]}}},
        "agent": {"default_model": {"provider": _ID, "model": server.model}},
    }
    note = "Zed keeps keys apart: start it with this variable, or enter the key in Agent Settings, LLM Providers."
    return Setup({"~/.config/zed/settings.json": _json(values)}, {API_KEY_VARIABLE: server.key}, (note,))


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
    "claude": _claude,
    "codex": _codex,
    "opencode": _opencode,
    "qwen": _qwen,
    "pi": _pi,
    "vscode": _vscode,
    "cline": _cline,
    "continue": _continue,
    "aider": _aider,
    "zed": _zed,
    "hermes": _hermes,
    "openclaw": _openclaw,
    "open-webui": _open_webui,
}
LAUNCHED = ("claude", "codex", "opencode", "qwen", "pi")
