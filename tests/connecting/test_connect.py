"""`mlx-specprefill connect`: what it prints can be read by the agents, and no file is touched."""

from __future__ import annotations

import io
import json
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from mlx_specprefill_server.agent_setup import AGENTS, RunningServer
from mlx_specprefill_server.cli import app
from mlx_specprefill_server.cli.agents import text_of
from tests.support.connected import files_in, variables_in

from ..server.conftest import live as live  # the fixtures of the server's tests
from ..server.fakes import FakeEngine
from ..server.test_custom_tools import is_patch

FILES = {
    "codex": ".codex/config.toml",
    "opencode": ".config/opencode/opencode.json",
    "claude": ".claude/settings.json",
    "qwen": ".qwen/settings.json",
    "cline": ".cline/data/settings/providers.json",
    "continue": ".continue/config.yaml",
    "aider": ".aider.conf.yml",
    "zed": ".config/zed/settings.json",
}
SEVERAL = {
    "data": [
        {"id": "large", "aliases": ["gpt-5"], "context_length": 9000},
        {"id": "small", "aliases": ["quick"], "context_length": 50_000},
        {"id": "gone", "aliases": [], "context_length": None},
    ]
}
READ_AS: dict[str, Any] = {".toml": tomllib.loads, ".json": json.loads, ".yaml": yaml.safe_load, ".yml": yaml.safe_load}
ODD = 'Ünder "the" \\ hat: #1 🎩 it\'s'  # a name that every format has to quote


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    yield fake
    fake.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def base(live: Any, home: Path) -> str:
    return str(live(api_keys=("geheim",), model_alias="org/local")[0])


def connect(*options: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["connect", *options])
    assert result.exit_code == code, result.output
    return result


@pytest.mark.parametrize("agent", [*FILES, "open-webui", "some-editor"])
def test_it_prints_the_servers_own_address_model_window_and_key(home: Path, base: str, agent: str) -> None:
    said = connect(agent, "--url", f"{base}/v1/", "--api-key", "geheim").stdout
    assert base in said
    assert "geheim" in said
    assert agent == "open-webui" or "org/local" in said
    assert agent not in FILES or ("4096" in said and FILES[agent] in files_in(said))
    assert list(home.iterdir()) == []


def test_an_agent_that_is_not_known_is_told_what_it_needs(home: Path, base: str) -> None:
    done = connect("codexx", "--url", base, "--api-key", "geheim")
    assert done.stdout == (
        f"export OPENAI_BASE_URL={base}/v1\nexport OPENAI_API_KEY=geheim\nexport OPENAI_MODEL=org/local\n"
    )
    assert "only codex, opencode, claude, qwen, cline, continue, aider, zed, open-webui" in done.stderr


def values_in(value: Any) -> list[Any]:
    """Return all that is in tables and lists, names and values."""
    if isinstance(value, dict):
        return [*value, *(found for inner in value.values() for found in values_in(inner))]
    return [found for inner in value for found in values_in(inner)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("agent", FILES)
def test_each_file_can_be_read_whatever_the_names(agent: str) -> None:
    server = RunningServer("http://[::1]:8000", ODD, 50_000, 'k"e\\y')
    files = files_in(text_of(AGENTS[agent](server)))
    found = [word for name, text in files.items() for word in values_in(READ_AS[Path(name).suffix](text))]
    assert any(ODD in str(word) for word in found)
    assert any(str(word).startswith(server.base) for word in found)
    assert agent == "zed" or server.key in found  # Zed's key is a variable
    assert {server.window, str(server.window)} & set(found)


def test_the_command_that_needs_no_file_says_what_the_file_says(home: Path, base: str) -> None:
    for server in (RunningServer(base, "local", 50_000, "none"), RunningServer(base, ODD, 50_000, "it's")):
        claude, opencode = text_of(AGENTS["claude"](server)), text_of(AGENTS["opencode"](server))
        assert variables_in(claude) == json.loads(files_in(claude)[FILES["claude"]])["env"]
        said = json.loads(variables_in(opencode)["OPENCODE_CONFIG_CONTENT"])
        assert said.items() <= json.loads(files_in(opencode)[FILES["opencode"]]).items()
    for agent in ("claude", "opencode"):
        printed = connect(agent, "--url", base, "--api-key", "geheim").stdout
        assert printed.partition("\n\n")[0].endswith(f" \\\n{agent}")


def test_codex_gets_its_own_tools_and_an_example_of_a_patch(home: Path, base: str) -> None:
    files = files_in(connect("codex", "--url", base, "--api-key", "geheim").stdout)
    configured = tomllib.loads(files[FILES["codex"]])
    catalogue = json.loads(files[f".codex/{configured['model_catalog_json']}"])
    (model,) = catalogue["models"]
    assert (model["slug"], model["context_window"]) == (configured["model"], 4096)
    assert (model["apply_patch_tool_type"], model["supports_search_tool"]) == ("freeform", True)
    instructions = model["base_instructions"]
    begin, end = "*** Begin Patch", "*** End Patch\n"
    assert is_patch(instructions[instructions.index(begin) : instructions.index(end) + len(end)])


def test_mistakes_are_one_line(home: Path, base: str) -> None:
    for options, said in (
        (["codex", "--url", "http://127.0.0.1:9"], "start the server first"),
        (["codex", "--url", "http://[x"], "http://[x/v1/models does not answer"),
        (["codex", "--url", base], "401"),
        (["codex", "--url", f"{base}/nowhere", "--api-key", "geheim"], "404"),
    ):
        output = connect(*options, code=2).output
        assert said in output
        assert output.startswith("error: ")
        assert len(output.splitlines()) == 1


@pytest.mark.parametrize("answer", [b"", b"{}", b'{"data": ["x"]}', b'{"data": [{"id": "x"}]}'])
def test_another_server_is_not_taken_for_ours(home: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(answer))
    assert "does not answer as this project's server does" in connect("codex", code=2).stderr


def test_one_of_several_models_is_connected(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps(SEVERAL).encode()
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(answer))
    first, other = connect("codex"), connect("codex", "--model", "quick")
    assert '"large"' in first.stdout
    assert "window has 9,000 tokens" in first.stderr
    assert '"small"' in other.stdout
    assert "50000" in other.stdout
    assert "window has" not in other.stderr
    assert "has: large, small, gone" in connect("codex", "--model", "x", code=2).output
    assert "does not know the window of gone" in connect("codex", "--model", "gone", code=2).output
