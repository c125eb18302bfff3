"""Service files as launchd and systemd read them, and what is asked of stand-ins for their commands."""

from __future__ import annotations

import os
import plistlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mlx_specprefill_server import cli
from mlx_specprefill_server.service_managers import Launchd, ServiceError, Systemd

AWKWARD = ["--model-alias", 'a "quoted" 50% $HOME ${X} %h \\name', "--api-key", "clé ä"]
SERVE = [sys.executable, "-m", "mlx_specprefill_server", "serve"]
RECORDER = (
    '#!/bin/sh\necho "$(basename "$0") $*" >>"$CALLS"\n[ ! -e "$CALLS.fail" ] || { echo "no bus" >&2; exit 1; }\n'
)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the managers' commands were called with."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("systemctl", "journalctl", "launchctl", "tail"):
        (programs / name).write_text(RECORDER)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "calls"


def service(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["service", *arguments])


def lines(calls: Path) -> list[str]:
    return calls.read_text().splitlines() if calls.exists() else []


class TestSystemd:
    @pytest.fixture(autouse=True)
    def _linux(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "platform", "linux")

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        return tmp_path / ".config/systemd/user/mlx-specprefill.service"

    def test_the_whole_life(self, calls: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLX_SPECPREFILL_API_KEYS", "geheim")
        done = service("install", "--pair", "demo", "--port", "8001")
        assert done.exit_code == 0, done.output
        assert f"{file} is written" in done.stdout
        assert "geheim" not in done.output
        assert file.stat().st_mode & 0o777 == 0o600
        assert 'Environment="MLX_SPECPREFILL_API_KEYS=geheim"' in file.read_text()
        assert '"serve" "--pair" "demo" "--port" "8001"' in file.read_text()
        assert lines(calls) == [
            "systemctl --user daemon-reload",
            "systemctl --user enable --now mlx-specprefill.service",
        ]
        assert service("status").exit_code == 0
        assert service("logs", "-n", "7", "-f").exit_code == 0
        assert service("remove").exit_code == 0
        assert lines(calls)[2:] == [
            "systemctl --user status --no-pager mlx-specprefill.service",
            "journalctl --user --unit=mlx-specprefill.service --lines=7 --follow",
            "systemctl --user disable --now mlx-specprefill.service",
            "systemctl --user daemon-reload",
        ]
        assert not file.exists()

    def test_installing_again_stops_the_old_one_first(self, calls: Path, file: Path) -> None:
        service("install", "--port", "1")
        service("install", "--port", "2")
        assert '"--port" "2"' in file.read_text()
        assert lines(calls)[2] == "systemctl --user disable --now mlx-specprefill.service"

    def test_wrong_options_install_nothing(self, calls: Path, file: Path) -> None:
        done = service("install", "--port", "abc")
        assert done.exit_code == 2
        assert "--port" in done.stderr
        assert service("install", "--prot", "1").exit_code == 2
        assert not file.exists()
        assert lines(calls) == []

    @pytest.mark.parametrize("command", ["status", "logs", "remove"])
    def test_what_is_not_installed_is_said(self, calls: Path, command: str) -> None:
        done = service(command)
        assert (done.exit_code, "mlx-specprefill service install" in done.stderr) == (2, True)

    def test_a_manager_that_refuses_is_quoted(self, calls: Path) -> None:
        calls.with_name("calls.fail").touch()
        done = service("install")
        assert done.exit_code == 2
        assert done.stderr == "error: systemctl --user daemon-reload ended with status 1: no bus\n"

    def test_no_line_break_gets_into_the_file(self, calls: Path) -> None:
        with pytest.raises(ServiceError, match="line break"):
            Systemd().text([*SERVE, "--model-alias", "a\nExecStartPre=/bin/evil"], {})
        with pytest.raises(ServiceError, match="line break"):
            Systemd().text(SERVE, {"MLX_SPECPREFILL_HOST": "a\nb"})

    @pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
    def test_systemd_takes_the_file(self, calls: Path, tmp_path: Path) -> None:
        """`verify` checks the file, and with debug messages it prints what systemd has read."""
        unit = tmp_path / "mlx-specprefill.service"
        unit.write_bytes(Systemd().text([*SERVE, *AWKWARD], {"MLX_SPECPREFILL_MODEL_ORIGIN": '100 % "mine" $HOME %h'}))
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        command = ["systemd-analyze", "--user", "--man=no", "verify", str(unit)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        noisy = {**environment, "SYSTEMD_LOG_LEVEL": "debug"}
        read = subprocess.run(command, env=noisy, capture_output=True, text=True, check=True)
        said = (line.strip().partition(": ") for line in (read.stdout + read.stderr).splitlines())
        dump = {name: value for name, _, value in said}
        assert dump["Environment"] == 'MLX_SPECPREFILL_MODEL_ORIGIN=100 % "mine" $HOME %h'
        words = [word.replace("\\$", "$").replace("$$", "$") for word in shlex.split(dump["Command Line"])]
        assert words == [*SERVE, *AWKWARD]


class TestLaunchd:
    @pytest.fixture(autouse=True)
    def _mac(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "platform", "darwin")

    def test_the_whole_life(self, calls: Path, tmp_path: Path) -> None:
        file, log = (
            tmp_path / "Library/LaunchAgents/mlx-specprefill.plist",
            tmp_path / "Library/Logs/mlx-specprefill.log",
        )
        domain = f"gui/{os.getuid()}"
        assert service("install", "--pair", "demo").exit_code == 0
        assert file.stat().st_mode & 0o777 == 0o600
        assert service("status").exit_code == 0
        assert service("logs").exit_code == 0
        assert service("remove").exit_code == 0
        assert lines(calls) == [
            f"launchctl bootstrap {domain} {file}",
            f"launchctl print {domain}/mlx-specprefill",
            f"tail -n100 {log}",
            f"launchctl bootout {domain}/mlx-specprefill",
        ]
        assert not file.exists()

    def test_the_file_says_what_was_meant(self, calls: Path, tmp_path: Path) -> None:
        said = plistlib.loads(Launchd().text([*SERVE, *AWKWARD], {"MLX_SPECPREFILL_HOST": "::1"}))
        assert said["ProgramArguments"] == [*SERVE, *AWKWARD]
        assert said["EnvironmentVariables"] == {"MLX_SPECPREFILL_HOST": "::1"}
        assert said["KeepAlive"] == {"SuccessfulExit": False}
        assert said["WorkingDirectory"] == str(tmp_path)


def test_other_systems_are_told(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "freebsd")
    done = service("install")
    assert done.exit_code == 2
    assert "services need launchd (macOS) or systemd (Linux)" in done.stderr
