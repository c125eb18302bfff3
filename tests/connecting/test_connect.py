"""`mlx-specprefill connect`: what it prints and writes, and what it leaves alone."""

from __future__ import annotations

import io
import json
import stat
import subprocess
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner, Result

from mlx_specprefill_server.cli import app

from ..server.conftest import live as live  # the fixtures of the server's tests
from ..server.fakes import FakeEngine
from ..server.test_custom_tools import is_patch

TOML = '# mine\nmodel = "theirs" # the usual one\n\n[projects."/work"]\ntrust_level = "trusted"'  # no line end
JSON = '{\n    "theme": "dark"\n}\n'
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
        {"id": "small", "aliases": ["quick"], "context_length": 50_000},
        {"id": "gone", "aliases": [], "context_length": None},
    ]
}
MOVED_BY = ("CODEX_HOME", "XDG_CONFIG_HOME", "CLAUDE_CONFIG_DIR", "QWEN_HOME", "CLINE_DATA_DIR", "CONTINUE_GLOBAL_DIR")
ALL = pytest.mark.parametrize("agent", FILES)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine()
    yield fake
    fake.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in MOVED_BY:
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
    readers: dict[str, Any] = {".toml": tomllib.loads, ".json": json.loads}
    return dict(readers.get(path.suffix, YAML(typ="safe").load)(path.read_text(encoding="utf-8")))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("agent", [*FILES, "open-webui", "some-editor"])
def test_it_prints_the_servers_own_address_model_window_and_key(home: Path, base: str, agent: str) -> None:
    said = connect(agent, "--url", f"{base}/v1/", "--api-key", "geheim").stdout
    assert base in said
    assert "geheim" in said
    assert agent == "open-webui" or "org/local" in said
    assert agent not in FILES or "4096" in said
    assert contents(home) == {}


def test_an_agent_that_is_not_known_is_told_what_it_needs(home: Path, base: str) -> None:
    done = connect("codexx", "--url", base, "--api-key", "geheim")
    assert done.stdout == (
        f"export OPENAI_BASE_URL={base}/v1\nexport OPENAI_API_KEY=geheim\nexport OPENAI_MODEL=org/local\n"
    )
    assert "only codex, opencode, claude, qwen, cline, continue, aider, zed, open-webui" in done.stderr


@ALL
def test_a_new_file_says_what_is_printed(home: Path, base: str, agent: str) -> None:
    printed = connect(agent, "--url", base, "--api-key", "geheim").stdout
    said = write(agent, base).stdout
    path = home / FILES[agent]
    assert agent == "cline" or path.read_text(encoding="utf-8") in printed  # Cline's has a date
    assert f"{path} is written\n" in said
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not [name for name in contents(home) if ".bak" in name]


@ALL
def test_an_old_file_keeps_what_it_says_and_a_copy_lies_beside_it(home: Path, base: str, agent: str) -> None:
    path, before = existing(home, agent)
    path.chmod(0o644)
    old = data(path)
    said = write(agent, base).stdout
    new = data(path)
    assert base in (text := path.read_text(encoding="utf-8"))
    assert [name for name in old if name not in new] == []
    assert all(new[name] == value for name, value in old.items() if name not in ("model", "models"))
    assert all(word in text for word in before.decode().split() if word.startswith("#"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    copy = path.with_name(f"{path.name}.bak")
    assert str(copy) in said
    assert copy.read_bytes() == before
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600


@ALL
def test_another_server_takes_the_place_of_the_first(home: Path, base: str, agent: str, live: Any) -> None:
    path, before = existing(home, agent)
    write(agent, base)
    first = path.read_bytes()
    if agent != "cline":
        said = write(agent, base).stdout
        assert said.startswith("Nothing to change.\n")
        assert "\nNow run: " in said
    other = live(api_keys=("geheim",), model_alias="another")[0]
    write(agent, other)
    assert other in (text := path.read_text(encoding="utf-8"))
    assert "another" in text
    assert base not in text
    copies = sorted(path.parent.glob(f"{path.name}.bak*"))
    assert [copy.read_bytes() for copy in copies] == [before, first]


@ALL
def test_what_cannot_be_read_is_left_alone_and_printed(home: Path, base: str, agent: str) -> None:
    path, _ = existing(home, agent)
    printed = connect(agent, "--url", base, "--api-key", "geheim").stdout
    for broken in (b"{ [ nonsense = \n", b"\xff\xfe"):
        path.write_bytes(broken)
        found = contents(home)
        done = write(agent, base, code=2)
        assert agent == "cline" or done.stdout == printed
        assert done.stderr.startswith(f"error: {path} is unchanged; add the lines printed above to it: ")
        assert len(done.stderr.splitlines()) == 1
        assert contents(home) == found


def test_codex_gets_its_own_tools_and_an_example_of_a_patch(home: Path, base: str) -> None:
    write("codex", base)
    configured = data(home / FILES["codex"])
    catalogue = data(home / ".codex" / configured["model_catalog_json"])
    (model,) = catalogue["models"]
    assert (model["slug"], model["context_window"]) == (configured["model"], 4096)
    assert (model["apply_patch_tool_type"], model["supports_search_tool"]) == ("freeform", True)
    instructions = model["base_instructions"]
    begin, end = "*** Begin Patch", "*** End Patch\n"
    assert is_patch(instructions[instructions.index(begin) : instructions.index(end) + len(end)])


def test_of_two_files_none_is_written_if_one_cannot_be(home: Path, base: str) -> None:
    (home / ".aider.model.metadata.json").write_text("[]")
    assert "it is no table of settings" in write("aider", base, code=2).stderr
    assert contents(home) == {".aider.model.metadata.json": b"[]"}


def test_a_link_stays_one(home: Path, base: str) -> None:
    path, before = existing(home, "codex")
    kept = home / "dotfiles" / "codex.toml"
    kept.parent.mkdir()
    path.rename(kept)
    path.symlink_to(kept)
    write("codex", base)
    assert path.is_symlink()
    assert base in kept.read_text(encoding="utf-8")
    assert path.with_name("config.toml.bak").read_bytes() == before


def test_nothing_is_written_before_the_copy_is_whole(home: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, before = existing(home, "codex")

    def no_space(file: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr(Path, "write_bytes", no_space)
    assert write("codex", base, code=2).stderr == f"error: {path}.bak: No space left on device\n"
    assert path.read_bytes() == before


def test_folders_that_the_user_has_moved(home: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODEX_HOME", str(home / "elsewhere"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "xdg"))
    write("codex", base)
    write("opencode", base)
    assert (home / "elsewhere" / "config.toml").exists()
    assert (home / "xdg" / "opencode" / "opencode.json").exists()


def test_opencodes_other_file_is_taken_where_there_is_one(home: Path, base: str) -> None:
    path = home / ".config/opencode/opencode.jsonc"
    path.parent.mkdir(parents=True)
    path.write_text(JSON)
    write("opencode", base)
    assert base in path.read_text(encoding="utf-8")
    assert not path.with_suffix(".json").exists()


def run_undo(output: str) -> None:
    (command,) = [line.removeprefix("To undo: ") for line in output.splitlines() if line.startswith("To undo: ")]
    subprocess.run(command, shell=True, check=True)


@ALL
def test_what_is_printed_undoes_it(home: Path, base: str, agent: str) -> None:
    path, before = existing(home, agent)
    old = contents(home)
    said = write(agent, base).stdout
    assert f"; {path}.bak is what it was" in said
    assert said.endswith(f"Now run: {'cn' if agent == 'continue' else agent}\n")
    assert path.read_bytes() != before
    run_undo(said)
    assert contents(home) == old


def test_a_new_file_is_undone_too(home: Path, base: str) -> None:
    run_undo(write("codex", base).stdout)
    assert contents(home) == {}


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


def test_an_agent_without_a_file_cannot_be_written(home: Path, base: str) -> None:
    for agent in ("open-webui", "some-editor"):
        done = write(agent, base, code=2)
        assert base in done.stdout
        assert "no file to write" in done.stderr
    assert contents(home) == {}


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
