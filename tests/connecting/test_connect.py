"""`mlx-specprefill connect`: what it prints and writes, and that undoing gives every file back."""

from __future__ import annotations

import io
import json
import os
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from mlx_specprefill_server.cli import app
from mlx_specprefill_server.cli.connecting import AgentName
from mlx_specprefill_server.connecting import changing, running
from mlx_specprefill_server.connecting.agents import AGENTS, MOVED_BY
from mlx_specprefill_server.connecting.json_files import data_of
from mlx_specprefill_server.connecting.undoing import without_ours

from ..server.conftest import live as live  # the fixtures of the server's tests
from ..server.fakes import FakeEngine

TOML = '# mine\nmodel = "theirs" # the usual one\n\n[projects."/work"]\ntrust_level = "trusted"'  # no line end
JSON = '{\n  // mine\n  "theme": "dark",\n}\n'
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
BEFORE = {
    "codex": TOML,
    "continue": "name: mine # x\nmodels:\n- name: theirs\n  provider: openai\n  model: m\n",
    "aider": "# mine\ndark-mode: true\n",
}
SEVERAL = {
    "data": [
        {"id": "large", "aliases": ["gpt-5"], "context_length": 9000},
        {"id": "small", "aliases": ["quick"], "context_length": 5000},
        {"id": "gone", "aliases": [], "context_length": None},
    ]
}
ALL = pytest.mark.parametrize("agent", FILES)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    yield fake
    fake.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (*MOVED_BY, "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def base(live: Any, home: Path) -> str:
    return str(live(api_keys=("geheim",), model_alias="org/local")[0])


def connect(*options: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["connect", *options])
    assert result.exit_code == code, result.output
    return result


def write(agent: str, base: str, code: int = 0) -> Result:
    return connect(agent, "--url", base, "--api-key", "geheim", "--write", code=code)


def existing(home: Path, agent: str) -> tuple[Path, bytes]:
    path, content = home / FILES[agent], BEFORE.get(agent, JSON).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path, content


def data(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    readers: dict[str, Any] = {".toml": tomllib.loads, ".yaml": yaml.safe_load, ".yml": yaml.safe_load}
    return dict(readers.get(path.suffix, data_of)(text))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_agent_can_be_asked_for() -> None:
    assert set(get_args(AgentName)) == set(AGENTS) == {*FILES, "open-webui"}


@pytest.mark.parametrize("agent", AGENTS)
def test_it_prints_the_servers_own_address_model_window_and_key(home: Path, base: str, agent: str) -> None:
    said = connect(agent, "--url", f"{base}/v1/", "--api-key", "geheim").stdout
    assert base in said
    assert "geheim" in said
    assert agent == "open-webui" or ("org/local" in said and "4096" in said)
    assert contents(home) == {}


@ALL
def test_a_new_file_says_what_is_printed_and_undoing_removes_it(home: Path, base: str, agent: str) -> None:
    printed = connect(agent, "--url", base, "--api-key", "geheim").stdout
    said = write(agent, base).stdout
    path = home / FILES[agent]
    assert agent == "cline" or path.read_text(encoding="utf-8") in printed  # Cline's has a date
    assert f"+++ {path}" in said
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    connect(agent, "--undo")
    assert contents(home) == {}


@ALL
def test_an_old_file_keeps_what_it_says_and_comes_back_byte_for_byte(home: Path, base: str, agent: str) -> None:
    path, before = existing(home, agent)
    path.chmod(0o644)
    old = data(path)
    write(agent, base)
    new = data(path)
    assert base in path.read_text(encoding="utf-8")
    assert [name for name in old if name not in new] == []
    assert "# mine" in (text := path.read_text(encoding="utf-8")) or "// mine" in text or "# x" in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    connect(agent, "--undo")
    assert path.read_bytes() == before
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert connect(agent, "--undo", code=2).output.startswith("error: there is nothing to undo")


@ALL
def test_writing_twice_still_leads_back_to_the_beginning(home: Path, base: str, agent: str, live: Any) -> None:
    path, before = existing(home, agent)
    write(agent, base)
    assert agent == "cline" or write(agent, base).stdout.startswith("Nothing to change.")
    other = live(api_keys=("geheim",), model_alias="another")[0]
    write(agent, other)
    assert other in (text := path.read_text(encoding="utf-8"))
    assert "another" in text
    assert base not in text
    connect(agent, "--undo")
    assert path.read_bytes() == before


@ALL
def test_what_cannot_be_read_is_left_alone(home: Path, base: str, agent: str) -> None:
    path, _ = existing(home, agent)
    path.write_bytes(broken := b"{ [ nonsense = \n")
    found = contents(home)
    said = write(agent, base, code=2).output
    assert said.startswith(f"error: {path} is left as it is: ")
    assert len(said.splitlines()) == 1
    assert path.read_bytes() == broken
    assert contents(home) == found
    path.write_bytes(b"\xff\xfe")
    assert "UTF-8" in write(agent, base, code=2).output


def test_what_the_agent_wrote_since_stays(home: Path, base: str) -> None:
    path, before = existing(home, "codex")
    write("codex", base)
    theirs = '\n[projects."/new"]\ntrust_level = "trusted"\n'
    with path.open("a", encoding="utf-8") as file:
        file.write(theirs)
    connect("codex", "--undo")
    text = path.read_text(encoding="utf-8")
    assert tomllib.loads(text) == tomllib.loads(before.decode()) | {
        "projects": {"/work": {"trust_level": "trusted"}, "/new": {"trust_level": "trusted"}}
    }
    assert base not in text


def test_a_change_of_the_same_lines_is_not_guessed_at(home: Path, base: str) -> None:
    path, before = existing(home, "codex")
    write("codex", base)
    path.write_text(changed := path.read_text(encoding="utf-8").replace("org/local", "mine"), encoding="utf-8")
    for options in (["--undo"], ["--write", "--url", base, "--api-key", "geheim"]):
        assert "--undo --force" in connect("codex", *options, code=2).output
        assert path.read_text(encoding="utf-8") == changed
    connect("codex", "--undo", "--force")
    assert path.read_bytes() == before


def test_a_file_that_was_removed_comes_back(home: Path, base: str) -> None:
    path, before = existing(home, "claude")
    write("claude", base)
    path.unlink()
    connect("claude", "--undo")
    assert path.read_bytes() == before


def test_a_link_stays_one(home: Path, base: str) -> None:
    path, before = existing(home, "codex")
    kept = home / "dotfiles" / "codex.toml"
    kept.parent.mkdir()
    path.rename(kept)
    path.symlink_to(kept)
    write("codex", base)
    assert path.is_symlink()
    assert base in kept.read_text(encoding="utf-8")
    connect("codex", "--undo")
    assert path.is_symlink()
    assert kept.read_bytes() == before


def test_copies_are_kept_before_anything_is_written(home: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, before = existing(home, "codex")
    real = os.replace

    def fail_on_the_file(source: Any, target: Any) -> None:
        if Path(target) == path:
            raise OSError(28, "No space left on device", str(target))
        real(source, target)

    monkeypatch.setattr(changing.os, "replace", fail_on_the_file)
    assert "No space left" in write("codex", base, code=2).output
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]  # no half-written file beside it
    assert (changing.state_folder("codex") / "0.before").read_bytes() == before
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(home))
    connect("codex", "--undo")
    assert path.read_bytes() == before


def test_copies_are_for_their_owner_alone(home: Path, base: str) -> None:
    write("codex", base)
    folder = changing.state_folder("codex")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
    assert record["files"] == [{"path": str(home / FILES["codex"]), "format": "toml"}]


def test_without_a_key_of_the_server_none_is_written(home: Path, live: Any) -> None:
    base = live()[0]
    connect("codex", "--url", base, "--write")
    connect("opencode", "--url", base, "--write")
    assert "bearer" not in (home / FILES["codex"]).read_text(encoding="utf-8")
    assert "apiKey" not in (home / FILES["opencode"]).read_text(encoding="utf-8")


def test_folders_that_the_user_has_moved(home: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODEX_HOME", str(home / "elsewhere"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "xdg"))
    write("codex", base)
    write("opencode", base)
    assert (home / "elsewhere" / "config.toml").exists()
    assert (home / "xdg" / "opencode" / "opencode.json").exists()


def test_opencodes_commented_file_is_taken_where_there_is_one(home: Path, base: str) -> None:
    path = home / ".config/opencode/opencode.jsonc"
    path.parent.mkdir(parents=True)
    path.write_text(JSON)
    write("opencode", base)
    assert base in path.read_text(encoding="utf-8")
    assert not path.with_suffix(".json").exists()


def test_a_window_that_is_too_small_is_said(home: Path, base: str) -> None:
    said = connect("claude", "--url", base, "--api-key", "geheim")
    assert "window has 4,096" in said.stderr
    assert "window has" not in connect("open-webui", "--url", base, "--api-key", "geheim").stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["codex", "--url", "http://127.0.0.1:9"], "Start the server first"),
        (["codex", "--write", "--undo"], "--write and --undo"),
        (["codex", "--force"], "--force belongs to --undo"),
        (["zed", "--undo"], "nothing to undo"),
    ],
)
def test_mistakes_are_one_line(home: Path, options: list[str], said: str) -> None:
    output = connect(*options, code=2).output
    assert said in output
    assert output.startswith("error: ")
    assert len(output.splitlines()) == 1


def test_other_mistakes(home: Path, base: str) -> None:
    assert "--api-key" in connect("codex", "--url", base, code=2).output
    assert "without --write" in write("open-webui", base, code=2).output
    assert contents(home) == {}


@pytest.mark.parametrize(
    ("before", "ours", "now", "expected"),
    [
        ("a\nb\n", "a\nX\nb\n", "a\nX\nb\nc\n", "a\nb\nc\n"),
        ("a\nb\n", "a\nb\nX\n", "a\nb\nX\nc\n", "a\nb\nc\n"),
        ("a\nb\n", "X\nb\n", "new\nX\nb\n", "new\na\nb\n"),
        ("", "X\nY\n", "X\nY\nc\n", "c\n"),
        ("a\n", "X\n", "Y\n", None),
        ("a\nb\nc\n", "a\nX\nc\n", "a\nX!\nc\n", None),
        ("a\nb\n", "a\nX\nY\nb\n", "a\nX\nz\nY\nb\n", None),
        ("a\n", "a\n", "b\n", "b\n"),
    ],
)
def test_taking_back_ours_and_nothing_else(before: str, ours: str, now: str, expected: str | None) -> None:
    assert without_ours(before, ours, now) == expected


def test_one_of_several_models_is_connected(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.urllib.request, "urlopen", lambda *_, **__: io.BytesIO(json.dumps(SEVERAL).encode()))
    assert '"large"' in connect("codex").stdout
    said = connect("codex", "--model", "quick").stdout
    assert '"small"' in said
    assert "5000" in said
    assert "has: large, small, gone" in connect("codex", "--model", "x", code=2).output
    assert "does not know the window of gone" in connect("codex", "--model", "gone", code=2).output
