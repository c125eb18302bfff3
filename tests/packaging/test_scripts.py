"""scripts/env.sh with stand-ins for Python: which one it takes, what it says, and when it installs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOGGING_PYTHON = '#!/bin/sh\necho "$@" >>"$(dirname "$0")/calls"\n[ "$1" != -V ] || echo "Python 3.11.0"\n'
WITHOUT_SMOLLM2 = LOGGING_PYTHON + 'case "$*" in *pull*) exit 2 ;; esac\n'
TOO_OLD = "#!/bin/sh\nexit 1\n"
WITHOUT_VENV = "#!/bin/sh\ncase $2 in *ensurepip*) exit 1 ;; *) exit 0 ;; esac\n"


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("benchmarks", "*.py"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "models").mkdir()
    shutil.copy(ROOT / "models" / "pairs.toml", tmp_path / "models")
    return tmp_path


def ensure(clone: Path, what: str = "run", python: Path | str = "") -> subprocess.CompletedProcess[str]:
    command = f'. "{clone}/scripts/env.sh"; ensure_env {what}'
    environment = {**os.environ, "PYTHON": str(python)}
    return subprocess.run(
        ["sh", "-euc", command, f"{clone}/scripts/serve"], env=environment, capture_output=True, text=True, check=False
    )


def test_an_old_python_is_named_in_one_line(clone: Path) -> None:
    done = ensure(clone, python=write_program(clone / "old", TOO_OLD))
    assert done.returncode == 1
    assert done.stderr.startswith("serve: Python 3.11 or newer is needed")
    assert done.stderr.count("\n") == 1
    assert not (clone / ".venv").exists()


def test_a_python_without_venv_says_what_to_install(clone: Path) -> None:
    done = ensure(clone, python=write_program(clone / "bare", WITHOUT_VENV))
    assert done.returncode == 1
    assert "python3-venv" in done.stderr
    assert done.stderr.count("\n") == 1


class TestOnAMac:
    """With stand-ins for the system: MLX has wheels for macOS 14 and later, and for arm64 alone."""

    @staticmethod
    def ensure(clone: Path, release: str, machine: str, system: str = "Darwin") -> subprocess.CompletedProcess[str]:
        write_program(clone / "bin/uname", f"#!/bin/sh\necho {system}\n")
        write_program(clone / "bin/sw_vers", f"#!/bin/sh\necho {release}\n")
        python = write_program(clone / "bin/python", f'#!/bin/sh\ncase "$*" in *platform*) echo {machine} ;; esac\n')
        command = f'. "{clone}/scripts/env.sh"; ensure_env run'
        environment = {**os.environ, "PYTHON": str(python), "PATH": f"{clone / 'bin'}:{os.environ['PATH']}"}
        serve = ["sh", "-euc", command, f"{clone}/scripts/serve"]
        return subprocess.run(serve, env=environment, capture_output=True, text=True, check=False)

    @pytest.mark.parametrize(
        ("release", "machine", "said"),
        [
            ("13.7.1", "arm64", "serve: MLX needs macOS 14 or newer; this is macOS 13.7.1.\n"),
            ("15.1", "x86_64", "serve: MLX needs Apple silicon and a Python for arm64; "),
        ],
    )
    def test_what_mlx_needs_is_said_before_anything_is_made(
        self, clone: Path, release: str, machine: str, said: str
    ) -> None:
        done = self.ensure(clone, release, machine)
        assert done.returncode == 1
        assert done.stderr.startswith(said)
        assert done.stderr.count("\n") == 1
        assert not (clone / ".venv").exists()

    @pytest.mark.parametrize(("release", "machine", "system"), [("14.0", "arm64", "Darwin"), ("", "x86_64", "Linux")])
    def test_where_mlx_runs_the_installation_begins(self, clone: Path, release: str, machine: str, system: str) -> None:
        assert "Making .venv with" in self.ensure(clone, release, machine, system).stderr


class TestInstalledOnce:
    @pytest.fixture
    def calls(self, clone: Path) -> Path:
        write_program(clone / ".venv/bin/python", LOGGING_PYTHON)
        return clone / ".venv/bin/calls"

    @staticmethod
    def installs(calls: Path) -> list[str]:
        return [line for line in calls.read_text().splitlines() if " install " in line]

    def test_the_second_start_installs_nothing(self, clone: Path, calls: Path) -> None:
        assert ensure(clone).returncode == 0
        assert ensure(clone).stderr == ""
        assert len(self.installs(calls)) == 1

    def test_a_changed_project_file_installs_again(self, clone: Path, calls: Path) -> None:
        ensure(clone)
        (clone / "pyproject.toml").write_text("changed")
        ensure(clone)
        assert len(self.installs(calls)) == 2

    def test_a_moved_clone_installs_again(self, clone: Path, calls: Path) -> None:
        ensure(clone)
        moved = clone.rename(clone.with_name("moved"))
        ensure(moved)
        assert len(self.installs(moved / ".venv/bin/calls")) == 2


def calls_of(clone: Path) -> list[str]:
    return (clone / ".venv/bin/calls").read_text().splitlines()


def serve(clone: Path, *arguments: str) -> list[str]:
    """Return the commands with which scripts/serve ran Python."""
    done = subprocess.run([clone / "scripts/serve", *arguments], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return [line for line in calls_of(clone) if line.startswith("-m mlx_specprefill_server")]


PULL = "-m mlx_specprefill_server pull smollm2 --no-next"  # the server starts next by itself


class TestSmolLM2:
    def test_it_is_fetched_at_the_first_start_only(self, clone: Path) -> None:
        write_program(clone / ".venv/bin/python", LOGGING_PYTHON)
        assert serve(clone, "--port", "1") == [PULL, "-m mlx_specprefill_server serve --port 1"]
        assert serve(clone).count(PULL) == 1

    def test_a_changed_list_of_pairs_fetches_again(self, clone: Path) -> None:
        write_program(clone / ".venv/bin/python", LOGGING_PYTHON)
        serve(clone)
        (clone / "models/pairs.toml").write_text("changed")
        assert serve(clone).count(PULL) == 2

    def test_where_it_can_not_be_had_the_server_starts_and_the_next_start_tries_again(self, clone: Path) -> None:
        write_program(clone / ".venv/bin/python", WITHOUT_SMOLLM2)
        assert serve(clone) == [PULL, "-m mlx_specprefill_server serve"]
        assert serve(clone).count(PULL) == 2

    @pytest.mark.parametrize(
        ("arguments", "fetched"),
        [
            ("--pair demo", False),
            ("--pair=demo", False),
            ("--target some/model", False),
            ("--help", False),
            ("--pair smollm2", True),
            ("--port 1 --pair=smollm2", True),
        ],
    )
    def test_it_is_fetched_only_where_it_is_served(self, clone: Path, arguments: str, fetched: bool) -> None:
        write_program(clone / ".venv/bin/python", LOGGING_PYTHON)
        assert (PULL in serve(clone, *arguments.split())) == fetched


class TestBench:
    @staticmethod
    def run(clone: Path, *arguments: str) -> list[str]:
        done = subprocess.run([clone / "scripts/bench", *arguments], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        return calls_of(clone)

    def test_it_installs_what_benchmarks_need_once_and_runs_the_program(self, clone: Path) -> None:
        write_program(clone / ".venv/bin/python", LOGGING_PYTHON)
        serve(clone)
        calls = [*self.run(clone, "ttft", "--keep", "0.2"), *self.run(clone)]
        assert "-P -m benchmarks ttft --keep 0.2" in calls
        assert calls[-1] == "-P -m benchmarks"
        assert len([line for line in calls_of(clone) if line.endswith("[bench]")]) == 1


class TestDocs:
    @pytest.mark.parametrize(
        ("arguments", "ran"),
        [
            ("", "-m mkdocs build --strict"),
            ("build --site-dir x", "-m mkdocs build --strict --site-dir x"),
            ("serve --dev-addr 127.0.0.1:1", "--watch models --dev-addr 127.0.0.1:1"),  # mkdocs takes the last address
        ],
    )
    def test_arguments_go_to_mkdocs(self, clone: Path, arguments: str, ran: str) -> None:
        write_program(clone / ".venv/bin/python", LOGGING_PYTHON)
        subprocess.run([clone / "scripts/docs", *arguments.split()], check=True, capture_output=True)
        assert calls_of(clone)[-1].endswith(ran)
