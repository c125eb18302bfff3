"""`mlx-specprefill connect` and `launch`: agents can read what they are given, and no file of the user is touched."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from mlx_specprefill_server.cli import app
from mlx_specprefill_server.cli.agents import command, launching
from mlx_specprefill_server.cli.agents.command import text_of
from mlx_specprefill_server.cli.agents.setup import AGENTS, LAUNCHED, RunningServer
from mlx_specprefill_server.cli.options import PairOptions
from tests.support.connected import files_in, variables_in

from ..server.conftest import live as live  # the fixtures of the server's tests
from ..server.fakes import FakeEngine
from ..server.test_custom_tools import is_patch

FILES = {
    "vscode": "Library/Application Support/Code/User/chatLanguageModels.json",
    "cline": ".cline/data/settings/providers.json",
    "continue": ".continue/config.yaml",
    "aider": ".aider.conf.yml",
    "zed": ".config/zed/settings.json",
    "hermes": ".hermes/config.yaml",
    "openclaw": ".openclaw/openclaw.json",
}
SEVERAL = {
    "data": [
        {"id": "large", "aliases": ["gpt-5"], "context_length": 9000},
        {"id": "small", "aliases": ["quick"], "context_length": 50_000},
        {"id": "gone", "aliases": [], "context_length": None, "error": "there is no such folder"},
    ]
}
READ_AS: dict[str, Any] = {".json": json.loads, ".yaml": yaml.safe_load, ".yml": yaml.safe_load}
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


@pytest.mark.parametrize("agent", [*FILES, *LAUNCHED, "open-webui", "some-editor"])
def test_it_prints_the_servers_own_address_model_window_and_key(home: Path, base: str, agent: str) -> None:
    said = connect(agent, "--url", f"{base}/v1/", "--api-key", "geheim").stdout
    assert base in said
    assert "geheim" in said
    assert agent == "open-webui" or "org/local" in said
    assert agent not in FILES or (re.search("4096|3072", said) and FILES[agent] in files_in(said))
    assert list(home.iterdir()) == []


def test_an_agent_that_is_not_known_is_told_what_it_needs(home: Path, base: str) -> None:
    done = connect("codexx", "--url", base, "--api-key", "geheim")
    assert done.stdout == (
        f"export OPENAI_BASE_URL={base}/v1\nexport OPENAI_API_KEY=geheim\nexport OPENAI_MODEL=org/local\n"
    )
    assert "only claude, codex, opencode, qwen, pi, vscode, cline, continue, aider, zed, hermes" in done.stderr


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
    assert {server.window, server.window - server.output} & {word for word in found if isinstance(word, int)}


# --- launch -----------------------------------------------------------------------------------------------------------

TELLER = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], dict(os.environ)]))
sys.exit(7)
"""


@pytest.fixture
def programs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for agents that print how they were started, on a model that calls no tools."""
    monkeypatch.setattr(command, "_check_tools", lambda agent, server: None)
    folder = tmp_path_factory.mktemp("bin")
    for name in LAUNCHED:
        (folder / name).write_text(TELLER)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def launch(capfd: pytest.CaptureFixture[str], *options: str, code: int = 7) -> tuple[list[str], dict[str, str], str]:
    """The arguments and the environment of the agent, and what was said on standard error."""
    result = CliRunner().invoke(app, ["launch", *options])
    assert result.exit_code == code, result.output
    out = capfd.readouterr().out
    arguments, environment = json.loads(out) if out else ([], {})
    return arguments, environment, result.stderr


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("agent", LAUNCHED)
def test_an_agent_is_launched_and_only_our_folder_has_files(
    home: Path, base: str, capfd: pytest.CaptureFixture[str], agent: str
) -> None:
    options = ("--url", base, "--api-key", "geheim", "--", "-p", "--model", "x y")
    arguments, environment, _ = launch(capfd, agent, *options)
    assert arguments[-3:] == ["-p", "--model", "x y"]
    files = [path for path in home.rglob("*") if path.is_file()]
    assert all(path.is_relative_to(home / ".cache" / "mlx-specprefill" / "agents") for path in files)
    assert {path.stat().st_mode & 0o777 for path in files} <= {0o600}
    texts = [path.read_text() for path in files]
    told = "\n".join([*arguments, *environment.values(), *texts])
    assert all(word in told for word in (base, "geheim", "org/local", "4096"))
    assert "geheim" not in "\n".join(arguments)  # other users see them
    printed = connect(agent, "--url", base, "--api-key", "geheim").stdout
    assert list(files_in(printed).values()) == texts
    assert variables_in(printed).items() <= environment.items()


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("name", ["local", ODD])
def test_codex_gets_its_own_tools_and_an_example_of_a_patch(home: Path, name: str) -> None:
    setup = AGENTS["codex"](RunningServer("http://[::1]:8000", name, 50_000, "geheim"))
    values = [tomllib.loads(word) for word in setup.command[2::2]]
    configured = dict(one for value in values for one in value.items())
    provider = configured["model_providers"]["mlx-specprefill"]
    assert (provider["base_url"], provider["wire_api"]) == ("http://[::1]:8000/v1", "responses")
    assert setup.environment == {provider["env_key"]: "geheim"}
    (model,) = json.loads(setup.files[configured["model_catalog_json"]])["models"]
    assert (model["slug"], model["context_window"]) == (configured["model"], 50_000) == (name, 50_000)
    assert (model["apply_patch_tool_type"], model["supports_search_tool"]) == ("freeform", True)
    instructions = model["base_instructions"]
    begin, end = "*** Begin Patch", "*** End Patch\n"
    assert is_patch(instructions[instructions.index(begin) : instructions.index(end) + len(end)])


def test_claude_code_counts_no_tokens_down_and_its_memory_is_explained(home: Path, base: str) -> None:
    done = connect("claude", "--url", base, "--api-key", "geheim")
    assert variables_in(done.stdout)["CLAUDE_CODE_TOTAL_TOKENS_REMINDER"] == "off"
    assert "CLAUDE_CODE_DISABLE_AUTO_MEMORY=1" in done.stderr
    assert "CLAUDE_CODE_DISABLE_AUTO_MEMORY" not in done.stdout


def test_what_cannot_be_launched(home: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/nowhere/{name}" if name == "pi" else None)
    refused = CliRunner().invoke(app, ["launch", "pi", "--url", base, "--api-key", "geheim"])
    assert (refused.exit_code, "org/local can't call tools, and pi does everything" in refused.output) == (2, True)
    monkeypatch.setattr(command, "_check_tools", lambda agent, server: None)
    for options, said in (
        (
            ["zed", "--url", base],
            "zed can't be launched, only claude, codex, opencode, qwen, pi; `mlx-specprefill connect",
        ),
        (["what", "--url", base], "it is not known"),
        (["qwen", "--url", "http://127.0.0.1:9"], "qwen is not installed"),  # and no server is started
        (["pi", "--url", "http://127.0.0.1:99999"], "http://127.0.0.1:99999: Port out of range"),
        (["pi", "--url", "http://[x"], "http://[x: "),
        (["pi", "--url", base], "401"),
        (["pi", "--url", "http://192.0.2.1:9"], "does not answer"),
    ):
        result = CliRunner().invoke(app, ["launch", *options])
        assert result.exit_code == 2, result.output
        assert said in result.output


def test_a_killed_agents_status_is_a_shells() -> None:
    assert launching.run(["/bin/sh", "-c", "kill -9 $$"], {}) == 128 + 9


@pytest.mark.parametrize("given", [None, "example.org", "*"])
@pytest.mark.usefixtures("programs")
def test_no_proxy_comes_between_this_machine_and_itself(
    base: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv("NO_PROXY", given)
    _, environment, _ = launch(capfd, "opencode", "--url", base, "--api-key", "geheim")
    expected = {None: "127.0.0.1,localhost,::1", "example.org": "example.org,127.0.0.1,localhost,::1", "*": "*"}
    assert environment["no_proxy"] == environment["NO_PROXY"] == expected[given]


def test_servers_at_two_ports_keep_their_files_apart() -> None:
    for agent in ("codex", "qwen", "pi"):
        first, second = (AGENTS[agent](RunningServer(f"http://127.0.0.1:{n}", "m", 9000, "k")) for n in (8000, 8001))
        assert not first.files.keys() & second.files.keys()


@pytest.mark.parametrize("agent", ["zed", "continue", "vscode"])
def test_a_model_without_tools_is_given_none(agent: str) -> None:
    with_tools, without = (
        text_of(AGENTS[agent](RunningServer("http://127.0.0.1:8000", "m", 9000, "k", tools=tools)))
        for tools in (True, False)
    )
    assert re.search(r'tool\w*"(: true|\])', with_tools, re.IGNORECASE)
    assert not re.search(r'tool\w*"(: true|\])', without, re.IGNORECASE)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_started_server_ends_when_its_terminal_is_closed(
    home: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    server, listens = subprocess.Popen(["sleep", "60"]), iter([False, True])
    monkeypatch.setattr(launching, "_listens", lambda *_: next(listens))
    monkeypatch.setattr(launching, "ask_server", lambda *_: {})
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: server)
    before = signal.signal(number, signal.SIG_DFL)
    with pytest.raises(SystemExit) as ended:
        closed_within(launching.Serving("http://127.0.0.1:9", PairOptions(), None), number)
    restored = signal.signal(number, before)
    assert (ended.value.code, server.poll() is not None) == (128 + number, True)
    assert restored == signal.SIG_DFL


def closed_within(serving: launching.Serving, number: signal.Signals) -> None:
    with serving:
        os.kill(os.getpid(), number)
        time.sleep(9)


@pytest.mark.extended
@pytest.mark.usefixtures("programs")
def test_a_server_is_started_where_none_runs_and_ends_with_the_agent(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    _, environment, said = launch(capfd, "claude", "--url", url, "--api-key", "geheim", "--pair", "demo")
    assert "starting one; its log is" in said
    assert environment["ANTHROPIC_BASE_URL"] == url
    with pytest.raises(OSError, match=r"."):
        socket.create_connection(("127.0.0.1", port), 1).close()
    _, _, said = launch(capfd, "claude", "--url", url, "--target", "/no/such/folder", code=2)
    assert "the server could not be started: error: /no/such/folder" in said


def test_mistakes_are_one_line(home: Path, base: str) -> None:
    for options, said in (
        (["codex", "--url", "http://127.0.0.1:9"], "start the server first"),
        (["codex", "--url", "http://127.0.0.1:99999"], "http://127.0.0.1:99999/v1/models does not answer"),
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
    monkeypatch.setattr(urllib.request.OpenerDirector, "open", lambda *_, **__: io.BytesIO(answer))
    assert "does not answer as this project's server does" in connect("codex", code=2).stderr


def test_one_of_several_models_is_connected(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = json.dumps(SEVERAL).encode()
    monkeypatch.setattr(urllib.request.OpenerDirector, "open", lambda *_, **__: io.BytesIO(answer))
    first, other = connect("codex"), connect("codex", "--model", "quick")
    assert '"large"' in first.stdout
    assert "window has 9,000 tokens" in first.stderr
    assert '"small"' in other.stdout
    assert "50000" in other.stdout
    assert "window has" not in other.stderr
    assert "has: large, small, gone" in connect("codex", "--model", "x", code=2).output
    assert "know the window of gone: there is no such folder" in connect("codex", "--model", "gone", code=2).output


def test_a_window_that_is_being_read_is_waited_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = iter([None, None, 70_000])
    monkeypatch.setattr(command, "_POLL_S", 0.0)
    monkeypatch.setattr(
        command,
        "ask_server",
        lambda *_: {"data": [{"id": "late", "context_length": next(windows), "error": None}]},
    )
    assert "70000" in connect("codex").stdout
    monkeypatch.setattr(command, "_READING_S", 0.0)
    windows = iter([None, None])
    assert "know the window of late: it has not read its files yet" in connect("codex", code=2).output
    monkeypatch.setattr(command, "ask_server", lambda *_: {"data": []})
    assert "http://127.0.0.1:8000 has no models" in connect("codex", code=2).output
