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
from typer.testing import CliRunner, Result

from mlx_specprefill_server import cli
from mlx_specprefill_server.__main__ import main
from mlx_specprefill_server.cli import service as service_module
from mlx_specprefill_server.cli.service import ServiceError, plist, unit

AWKWARD = ["--model-alias", 'a "quoted" 50% $HOME ${X} %h \\name', "--api-key", "clé ä"]
SERVE = [sys.executable, "-m", "mlx_specprefill_server", "serve"]
RECORDER = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
[ ! -e "$CALLS.fail" ] || { echo "no bus" >&2; exit 1; }
"""
# The statuses of each call of `launchctl VERB DOMAIN`, from a file per verb and domain; the last one stays.
LAUNCHCTL = f"""{RECORDER}answers="$ANSWERS/$1-${{2%%/*}}"
[ -e "$answers" ] || case "$1" in bootstrap | print) exit 0 ;; *) exit 113 ;; esac
status="$(head -n 1 "$answers")"
left="$(tail -n +2 "$answers")"
[ -z "$left" ] || echo "$left" >"$answers"
[ "$status" = 0 ] || echo "Bootstrap failed: $status" >&2
exit "$status"
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with the arguments of the managers' commands."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("systemctl", RECORDER), ("launchctl", LAUNCHCTL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("ANSWERS", str(tmp_path))
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
        assert service("uninstall").exit_code == 0
        assert lines(calls)[2:] == ["systemctl --user disable --now mlx-specprefill.service"]
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

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (("--pair", "nonsense"), "no pair 'nonsense'"),
            (("--target", "/no/model"), "/no/model: there is no such folder"),
            (("--pair", "demo", "--target", "/no/model"), "exclude each other"),
        ],
    )
    def test_a_model_that_is_not_here_installs_nothing(
        self, calls: Path, file: Path, options: tuple[str, ...], says: str
    ) -> None:
        done = service("install", *options)
        assert done.exit_code == 2
        assert says in done.stderr
        assert not file.exists()
        assert lines(calls) == []

    def test_what_is_not_installed_is_said(self, calls: Path, file: Path) -> None:
        done = service("uninstall")
        assert (done.exit_code, done.stderr) == (2, f"error: the service is not installed: {file} does not exist\n")

    def test_a_manager_that_refuses_is_quoted(self, calls: Path) -> None:
        calls.with_name("calls.fail").touch()
        done = service("install", "--pair", "demo")
        assert done.exit_code == 2
        assert done.stderr == "error: systemctl --user daemon-reload ended with status 1: no bus\n"

    def test_what_does_not_start_leaves_the_file_as_it_was(self, calls: Path, file: Path) -> None:
        """Without a bus of this user nothing is started, and nothing may begin at the next login."""
        calls.with_name("calls.fail").touch()
        service("install", "--port", "1")
        assert not file.exists()
        calls.with_name("calls.fail").unlink()
        service("install", "--port", "2")
        before = file.read_bytes()
        calls.with_name("calls.fail").touch()
        service("install", "--port", "3")
        assert file.read_bytes() == before

    def test_what_is_enabled_and_does_not_start_is_disabled_again(
        self, calls: Path, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`enable` leaves a link to the file, which systemd would follow at every login."""
        (calls.parent / "bin" / "systemctl").write_text(f'{RECORDER}[ "$2" != enable ]\n')
        assert service("install").exit_code == 2
        assert lines(calls)[-1] == "systemctl --user disable --now mlx-specprefill.service"
        assert not file.exists()

    def test_what_models_and_networks_need_is_kept(
        self, calls: Path, file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kept = ("HF_HOME", "HF_TOKEN", "HUGGINGFACE_HUB_CACHE", "https_proxy", "NO_PROXY", "MLX_MAX_OPS_PER_BUFFER")
        for name in (*kept, "SECRET_OF_ANOTHER"):
            monkeypatch.setenv(name, f"value of {name}")
        service("install")
        text = file.read_text()
        assert all(f'Environment="{name}=value of {name}"' in text for name in kept)
        assert "SECRET_OF_ANOTHER" not in text

    def test_no_line_break_gets_into_the_file(self, calls: Path) -> None:
        with pytest.raises(ServiceError, match="line break"):
            unit([*SERVE, "--model-alias", "a\nExecStartPre=/bin/evil"], {})
        with pytest.raises(ServiceError, match="line break"):
            unit(SERVE, {"MLX_SPECPREFILL_HOST": "a\nb"})

    @pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
    def test_systemd_takes_the_file(self, calls: Path, tmp_path: Path) -> None:
        """`verify` checks the file, and with debug messages it prints what systemd has read."""
        written = tmp_path / "mlx-specprefill.service"
        written.write_bytes(unit([*SERVE, *AWKWARD], {"MLX_SPECPREFILL_MODEL_ALIAS": '100 % "mine" $HOME %h'}))
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
        command = ["systemd-analyze", "--user", "--man=no", "verify", str(written)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        noisy = {**environment, "SYSTEMD_LOG_LEVEL": "debug"}
        read = subprocess.run(command, env=noisy, capture_output=True, text=True, check=True)
        said = (line.strip().partition(": ") for line in (read.stdout + read.stderr).splitlines())
        dump = {name: value for name, _, value in said}
        assert dump["Environment"] == 'MLX_SPECPREFILL_MODEL_ALIAS=100 % "mine" $HOME %h'
        words = [word.replace("\\$", "$").replace("$$", "$") for word in shlex.split(dump["Command Line"])]
        assert words == [*SERVE, *AWKWARD]


class TestLaunchd:
    @pytest.fixture(autouse=True)
    def _mac(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "platform", "darwin")

    @pytest.fixture(autouse=True)
    def naps(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """Seconds that were slept."""
        slept: list[float] = []
        monkeypatch.setattr(service_module, "sleep", slept.append)
        return slept

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        return tmp_path / "Library/LaunchAgents/mlx-specprefill.plist"

    def answer(self, calls: Path, call: str, *statuses: int) -> None:
        calls.with_name(call).write_text("".join(f"{status}\n" for status in statuses))

    def begun(self, file: Path, domain: str = "gui") -> list[str]:
        """Return the calls that start the service, when somebody is logged in at the screen."""
        here = f"{domain}/{os.getuid()}"
        return [f"launchctl print gui/{os.getuid()}", f"launchctl bootstrap {here} {file}"]

    def ended(self, domain: str = "gui") -> list[str]:
        here = f"{domain}/{os.getuid()}"
        return [f"launchctl print gui/{os.getuid()}", f"launchctl bootout {here}/mlx-specprefill"]

    def test_the_whole_life(self, calls: Path, file: Path, naps: list[float]) -> None:
        done = service("install", "--pair", "demo")
        assert (done.exit_code, done.stderr) == (0, "")
        assert "Library/Logs/mlx-specprefill.log" in done.stdout
        assert file.stat().st_mode & 0o777 == 0o600
        assert plistlib.loads(file.read_bytes())["LimitLoadToSessionType"] == ["Aqua", "Background"]
        assert lines(calls) == self.begun(file)
        calls.unlink()
        assert service("uninstall").exit_code == 0
        assert lines(calls) == self.ended()
        assert not file.exists()
        assert naps == []

    def test_the_file_says_what_was_meant(self, calls: Path, tmp_path: Path) -> None:
        said = plistlib.loads(plist([*SERVE, *AWKWARD], {"MLX_SPECPREFILL_HOST": "::1"}))
        assert said["ProgramArguments"] == [*SERVE, *AWKWARD]
        assert said["EnvironmentVariables"] == {"MLX_SPECPREFILL_HOST": "::1"}
        assert said["ExitTimeOut"] == 60  # 30 s for running requests, and prefixes are written then
        assert said["KeepAlive"] == {"SuccessfulExit": False}
        assert said["WorkingDirectory"] == str(tmp_path)

    @pytest.mark.parametrize(("name", "status"), [("mlx-specprefill", 0), ("0", 2), (None, 2)])
    def test_wrong_options_are_no_reason_to_start_again(
        self, monkeypatch: pytest.MonkeyPatch, name: str | None, status: int
    ) -> None:
        """launchd names the service to what it runs; a shell is named otherwise."""
        monkeypatch.setattr(sys, "argv", ["mlx-specprefill", "serve", "--prot", "1"])
        monkeypatch.delenv("XPC_SERVICE_NAME", raising=False)
        if name is not None:
            monkeypatch.setenv("XPC_SERVICE_NAME", name)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == status

    def test_installing_again_waits_until_the_old_one_has_stopped(
        self, calls: Path, file: Path, naps: list[float]
    ) -> None:
        """`bootout` returns at once; `bootstrap` fails until the service has ended."""
        service("install", "--port", "1")
        calls.unlink()
        self.answer(calls, "bootstrap-gui", 5, 5, 37, 0)
        assert service("install", "--port", "2").exit_code == 0
        assert naps == [1, 1, 1]
        assert plistlib.loads(file.read_bytes())["ProgramArguments"][-1] == "2"
        assert lines(calls) == [*self.ended(), *self.begun(file), *self.begun(file)[1:] * 3]

    @pytest.mark.parametrize(("status", "repeats"), [(5, 60), (78, 0)])
    def test_a_start_that_keeps_failing_is_quoted(
        self, calls: Path, naps: list[float], status: int, repeats: int
    ) -> None:
        self.answer(calls, "bootstrap-gui", status)
        done = service("install")
        assert done.exit_code == 2
        assert f"ended with status {status}: Bootstrap failed: {status}" in done.stderr
        assert naps == [1] * repeats
        assert not any("bootstrap user/" in line for line in lines(calls))

    def test_without_a_login_at_the_screen_it_starts_in_the_background(self, calls: Path, file: Path) -> None:
        """As over SSH: there is no domain `gui/UID`."""
        self.answer(calls, "print-gui", 125)
        assert service("install").exit_code == 0
        assert service("uninstall").exit_code == 0
        assert lines(calls) == [*self.begun(file, "user"), *self.ended("user")]


@pytest.mark.parametrize("system", ["darwin", "linux"])
@pytest.mark.parametrize("value", ["hf_geheim\x1b[0m", "hf_geheim\udcff"])
def test_what_no_file_can_hold_is_named_and_not_shown(
    calls: Path, monkeypatch: pytest.MonkeyPatch, system: str, value: str
) -> None:
    """A key with a control character, or of bytes that are no text."""
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setenv("HF_TOKEN", value)
    done = service("install", "--pair", "demo")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: 'HF_TOKEN' has a control character")
    assert "geheim" not in done.output
    assert lines(calls) == []


def test_other_systems_are_told(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "freebsd")
    done = service("install")
    assert done.exit_code == 2
    assert "services need launchd (macOS) or systemd (Linux)" in done.stderr
