"""Every command and program of the README, the guides and the pages on clients and numbers: it runs, or it is known why
not. Of those that don't run here, programs of this repository at least exist and have the options that they are given.
"""

from __future__ import annotations

import json
import os
import plistlib
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from contextlib import redirect_stdout, suppress
from functools import cache
from io import StringIO
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from benchmarks.harness.command import main
from typer.core import TyperGroup
from typer.testing import CliRunner

from mlx_specprefill_server.cli import app
from mlx_specprefill_server.running.process import GRACE_S
from tests.support.serving import Server

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted(path for folder in ("guides", "clients", "machines") for path in (ROOT / "docs" / folder).glob("*.md"))
ADDRESS = "http://127.0.0.1:8000"
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def unit(text: str) -> ConfigParser:
    """Return a unit of systemd, whose names have capitals."""
    parser = ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read_string(text)
    return parser


READ_AS: dict[str, Callable[[str], Any]] = {
    "json": json.loads,
    "toml": tomllib.loads,
    "xml": lambda text: plistlib.loads(text.encode()),
    "ini": unit,
}
ON_THE_MACHINE = ("mlx-specprefill list", "mlx-specprefill recommend")
RUN_HERE = ("mlx-specprefill connect", "scripts/bench ttft --help", *ON_THE_MACHINE)
NOT_RUN = {
    "tests/e2e/test_readme.py runs it, or a test below": ("python3 -c", "curl "),
    "starts a server, as tests/e2e, tests/distributed and scripts/try_install.py do": (
        "scripts/serve",
        "mlx-specprefill serve",
        "mlx.launch ",
    ),
    "tests/packaging/test_replicas.py runs it": ("LISTEN=127.0.0.1:8080 ",),
    "tests/server/test_stable.py runs it": ("mlx-specprefill inspect --misses",),
    "needs launchd or systemd": ("launchctl ", "systemctl "),
    "needs the network": (
        "git clone",
        "git pull",
        "pip ",
        "mlx-specprefill pull",
        "scripts/serve --target mlx-community/",
    ),
    "needs another program": ("mlx-specprefill launch", "hf cache ", "lm_eval run ", "scripts/record_agent"),
    "is what `connect` prints: tests/connecting reads it": (
        "ANTHROPIC_BASE_URL=",
        "MLX_SPECPREFILL_API_KEY=none",
        "export MLX_SPECPREFILL_API_KEY=none",
    ),
    "deletes what is the user's": ("rm -r ",),
    "takes minutes to days": (
        "mlx-specprefill eval",
        "MLX_SPECPREFILL_ESTIMATE=on mlx-specprefill eval",
        "mlx-specprefill bench",
        "mlx-specprefill doctor --compute",
        "scripts/bench ",
    ),
    "works on what such a run has left": ("tail -n 1 runs/",),
    "is part of CI": ("scripts/check", "scripts/test", "scripts/docs", ".ci/run"),
}


class Block(NamedTuple):
    page: str
    language: str
    text: str


def blocks(*languages: str) -> list[Block]:
    found = [(path, *block) for path in PAGES for block in FENCED.findall(path.read_text(encoding="utf-8"))]
    return [Block(str(path.relative_to(ROOT)), kind, text) for path, kind, text in found if kind in languages]


def commands(text: str) -> Iterator[str]:
    """The commands of a block: a line, unless quotes, a loop or a backslash go on in the next."""
    begun = ""
    for line in text.splitlines():
        begun += line + "\n"
        if begun.strip() and _whole(begun):
            yield begun.strip()
            begun = ""
    assert not begun.strip(), begun


def _whole(text: str) -> bool:
    if text.endswith("\\\n") or (text.startswith("for ") and not text.endswith("done\n")):
        return False
    try:
        shlex.split(text, comments=True)
    except ValueError:  # a quotation is open
        return False
    return True


def inline_commands(page: str) -> list[str]:
    """The commands in the running text of a page: programs with a word behind them, and scripts."""
    text = FENCED.sub("", (ROOT / page).read_text(encoding="utf-8"))
    return re.findall(r"`((?:scripts/|(?:mlx-specprefill|git|pip|curl) )[^`]+)`", text)


COMMANDS = sorted(
    {(block.page, one) for block in blocks("sh") for one in commands(block.text)}
    | {("README.md", one) for one in inline_commands("README.md")}
)


def test_every_block_is_of_a_kind_that_is_looked_at() -> None:
    known = {"sh", "python", *READ_AS}
    tree = "CONTRIBUTING.md"  # and its list of folders
    everything = [found for path in PAGES for found in FENCED.findall(path.read_text(encoding="utf-8"))]
    assert {kind for kind, _ in everything} <= {*known, ""}
    assert [block.page for block in blocks("")] == [tree]
    assert len(COMMANDS) > 40


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_every_command_runs_or_it_is_known_why_not(page: str, command: str) -> None:
    reasons = [reason for reason, starts in NOT_RUN.items() if command.startswith(starts)]
    assert reasons or command.startswith(RUN_HERE), f"{page}: run it here, or say in NOT_RUN why not: {command}"


def test_no_reason_is_left_without_a_command() -> None:
    starts = [start for group in (*NOT_RUN.values(), RUN_HERE) for start in group]
    assert [start for start in starts if not any(command.startswith(start) for _, command in COMMANDS)] == []


def calls() -> Iterator[tuple[str, ...]]:
    """The words of each call of a program of this repository, also where it stands in a loop or before a pipe."""
    for _, command in COMMANDS:
        for part in re.split(r"[;|\n]\s*(?:do\s)?", command.replace("\\\n", " ")) if "'" not in command else []:
            words = tuple(shlex.split(part, comments=True))
            if words and words[0].startswith(("mlx-specprefill", "scripts/")):
                yield words


@pytest.mark.parametrize("words", sorted(set(calls())), ids=" ".join)
def test_programs_have_the_options_that_they_are_given(words: tuple[str, ...]) -> None:
    program, *rest = words
    named = tuple(takewhile(lambda word: not word.startswith("-"), rest))
    given = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)} - {"--help"}
    assert given <= known_options(program, named, given)


def known_options(program: str, named: tuple[str, ...], given: set[str]) -> set[str]:
    if program == "mlx-specprefill":
        return options_of(named)
    assert os.access(ROOT / program, os.X_OK)
    if program == "scripts/serve":
        return options_of(("serve",))
    benchmark = named[:1] if program == "scripts/bench" else ()
    return set(re.findall(r"--?[a-z][\w-]*", help_of(program, *benchmark))) if given else set()


def options_of(names: tuple[str, ...]) -> set[str]:
    """Return the options of a command of `mlx-specprefill`. Words after its name are arguments."""
    found: Any = typer.main.get_command(app)
    for name in names:
        if not isinstance(found, TyperGroup):
            break
        found = found.get_command(typer.Context(found), name)
        assert found is not None, names
    return {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}


@cache
def help_of(program: str, *benchmark: str) -> str:
    """As the program prints it. Shell scripts would first look after its environment."""
    if program == "scripts/bench":
        with redirect_stdout(StringIO()) as said, suppress(SystemExit):
            main([*benchmark, "--help"])
        return said.getvalue()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), *filter(None, sys.path)])}
    named = ["-m", "recording"] if program == "scripts/record_agent" else [str(ROOT / program)]
    command = [sys.executable, *named, "--help"]
    return subprocess.check_output(command, env=environment, text=True, timeout=240)


@pytest.mark.extended
def test_an_agent_is_connected(server: Server, tmp_path: Path) -> None:
    found = {tuple(shlex.split(one, comments=True)[1:]) for _, one in COMMANDS if "mlx-specprefill connect" in one}
    assert "vscode" in {word for arguments in found for word in arguments}
    for arguments in found:
        user = CliRunner(env={"HOME": str(tmp_path), "MLX_SPECPREFILL_API_KEY": "none"})
        done = user.invoke(app, [*arguments, "--url", server.base])
        assert done.exit_code == 0, done.output
        assert server.base in done.stdout


@pytest.mark.parametrize("words", sorted({words for words in calls() if " ".join(words).startswith(ON_THE_MACHINE)}))
def test_what_is_on_the_machine_is_shown(words: tuple[str, ...], tmp_path: Path) -> None:
    done = CliRunner(env={"HOME": str(tmp_path)}).invoke(app, words[1:])
    assert done.exit_code == 0, done.output
    assert done.stdout


@pytest.mark.extended
@pytest.mark.parametrize("block", [b for b in blocks("python") if b.page != "README.md"], ids=lambda block: block.page)
def test_programs_do_what_they_say(server: Server, block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    program = block.text.replace(ADDRESS, server.base).replace('model="local"', 'model="target"')
    exec(compile(program, block.page, "exec"), {})
    said = capsys.readouterr().out
    assert "471128" in said or "471128" not in program
    assert "sparse" in said or "sparse" not in program


@pytest.mark.extended
def test_decisions_by_curl(server: Server) -> None:
    (command,) = [one for page, one in COMMANDS if page == "docs/guides/decisions.md" and one.startswith("curl ")]
    said = subprocess.check_output(["sh", "-c", command.replace(ADDRESS, server.base)], timeout=120)
    assert [answer["type"] for answer in json.loads(said)["answers"]] == ["predicate", "choice"]


@pytest.mark.parametrize("block", blocks(*READ_AS), ids=lambda block: f"{block.page} {block.language}")
def test_settings_can_be_read(block: Block) -> None:
    """That they are those of `connect` is tested with the reference."""
    assert READ_AS[block.language](block.text)


def test_the_services_start_the_server_with_options_that_it_has() -> None:
    agent, service = (READ_AS[block.language](block.text) for kind in ("xml", "ini") for block in blocks(kind))
    for program, name, *words in (agent["ProgramArguments"], shlex.split(service["Service"]["ExecStart"])):
        assert (Path(program).name, name) == ("mlx-specprefill", "serve")
        assert {word for word in words if word.startswith("-")} <= options_of(("serve",))
        assert CliRunner().invoke(app, [name, *words, "--help"]).exit_code == 0
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["ExitTimeOut"] == int(service["Service"]["TimeoutStopSec"]) > GRACE_S
