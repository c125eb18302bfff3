"""`mlx-specprefill service`: the server as this user's service, by launchd on macOS and by systemd on Linux."""

from __future__ import annotations

import os
import plistlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from time import sleep
from typing import Any

import typer

from mlx_specprefill import SpecPrefillError

from ..__main__ import SERVICE as NAME
from .common import choose_here, one_line_errors
from .options import PairOptions
from .serve import app as serve_app

RESTART_S = 30  # seconds before a restart after a failure
STOP_S = 60  # seconds; running requests get 30 s of them unless MLX_SPECPREFILL_SHUTDOWN_GRACE_S is set
_KEPT = ("HF_", "HUGGINGFACE_", "MLX_")  # beginnings of the variables' names that the service needs, and their end
_PROXY = "_PROXY"
_STILL_STOPPING = (5, 37)  # bootstrap's status while launchd stops the previous service: bootout returns before its end

app = typer.Typer(
    help="The server as a service of this user, started at login: launchd on macOS, systemd on Linux.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class ServiceError(SpecPrefillError):
    """The service can't be installed or uninstalled. The message says what to do."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def install(context: typer.Context) -> None:
    """Write the service's file and start the service. Takes the options of serve.

    The values of MLX_*, HF_*, HUGGINGFACE_* and *_PROXY variables are written into the file, too, which only its owner
    can read. Installing again replaces options and variables.
    """
    options: Any = typer.main.get_command(serve_app)
    given = options.make_context("mlx-specprefill service install", list(context.args)).params  # refuses as serve does
    command = [sys.executable, "-m", "mlx_specprefill_server", "serve", *context.args]
    environment = {name: value for name, value in os.environ.items() if _is_kept(name.upper())}
    with one_line_errors():
        if given["config"] is None:
            choose_here(PairOptions(**{field.name: given[field.name] for field in fields(PairOptions)}))
        file = _file()
        content = (plist if _is_mac() else unit)(command, environment)
        before = file.read_bytes() if file.exists() else None
        if before is not None:
            _stop()
        _write(file, content)
        try:
            _start(file)
        except ServiceError:
            _undo(file, before)
            raise
        log = _launchd_log() if _is_mac() else f"journalctl --user --unit={NAME}"
        typer.echo(f"{file} is written and the service is started. Its log: {log}")


@app.command()
def uninstall() -> None:
    """Stop the service and delete its file."""
    with one_line_errors():
        file = _file()
        if not file.exists():
            raise ServiceError(f"the service is not installed: {file} does not exist")
        _stop()
        file.unlink()
        typer.echo(f"The service is stopped, {file} is deleted.")


def _is_kept(name: str) -> bool:
    return name.startswith(_KEPT) or name.endswith(_PROXY)


def _undo(file: Path, before: bytes | None) -> None:
    """Leave the file as it was: one that could not be started would start at the next login."""
    _stop()
    if before is None:
        file.unlink()
    else:
        _write(file, before)


def plist(command: Sequence[str], environment: Mapping[str, str]) -> bytes:
    """Return the launchd agent that runs `command` in this process's folder.

    Raises:
        ServiceError: a value has a control character that XML can't hold.
    """
    log = str(_launchd_log())
    agent = {
        "Label": NAME,
        "ProgramArguments": list(command),
        "WorkingDirectory": str(Path.cwd()),
        "EnvironmentVariables": dict(environment),
        "LimitLoadToSessionType": ["Aqua", "Background"],  # a login at the screen, or any other
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RESTART_S,
        "ExitTimeOut": STOP_S,
        "ProcessType": "Interactive",  # a background process gets the slow cores
        "StandardOutPath": log,
        "StandardErrorPath": log,
        "Umask": 0o077,
    }
    for text in (*command, *(f"{name}={value}" for name, value in environment.items())):
        _check_xml(text)
    return plistlib.dumps(agent)


def _check_xml(text: str) -> None:
    try:
        plistlib.dumps(text)
    except ValueError as error:
        raise _unwritable(text) from error


def unit(command: Sequence[str], environment: Mapping[str, str]) -> bytes:
    """Return the systemd unit that runs `command`, whose first word is an absolute path, in this process's folder.

    Raises:
        ServiceError: a value has a line break or another control character.
    """
    variables = "".join(f"Environment={_quote(f'{name}={value}')}\n" for name, value in sorted(environment.items()))
    words = " ".join(_quote(word).replace("$", "$$") for word in command)
    return f"""[Unit]
Description={NAME}, an OpenAI-compatible inference server for long prompts
After=network.target

[Service]
Type=exec
ExecStart={words}
WorkingDirectory={_plain(str(Path.cwd()))}
{variables}Restart=on-failure
RestartSec={RESTART_S}
# 2: something in the options or the settings has to change first
RestartPreventExitStatus=2
TimeoutStopSec={STOP_S}
UMask=0077

[Install]
WantedBy=default.target
""".encode()


def _is_mac() -> bool:
    return sys.platform == "darwin"


def _file() -> Path:
    """Return the service's file. Raise ServiceError where no known service manager runs."""
    if _is_mac():
        return Path.home() / "Library" / "LaunchAgents" / f"{NAME}.plist"
    if sys.platform.startswith("linux") and shutil.which("systemctl") is not None:
        config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        return config / "systemd" / "user" / f"{NAME}.service"
    raise ServiceError("services need launchd (macOS) or systemd (Linux); start `mlx-specprefill serve` by other means")


def _start(file: Path) -> None:
    if not _is_mac():
        _check(_run("systemctl", "--user", "daemon-reload"))
        _check(_run("systemctl", "--user", "enable", "--now", f"{NAME}.service"))
        return
    _launchd_log().parent.mkdir(parents=True, exist_ok=True)
    domain = _launchd_domain()
    for _ in range(STOP_S):
        started = _run("launchctl", "bootstrap", domain, str(file))
        if started.returncode not in _STILL_STOPPING:
            break
        sleep(1)
    _check(started)


def _stop() -> None:
    """Stop the service. It is no error if it does not run."""
    if _is_mac():
        _run("launchctl", "bootout", f"{_launchd_domain()}/{NAME}")
    else:
        _run("systemctl", "--user", "disable", "--now", f"{NAME}.service")


def _launchd_domain() -> str:
    """Return the domain of a login at the screen, or of any other login if nobody is logged in there."""
    screen = f"gui/{os.getuid()}"
    return screen if _run("launchctl", "print", screen).returncode == 0 else f"user/{os.getuid()}"


def _launchd_log() -> Path:
    return Path.home() / "Library" / "Logs" / f"{NAME}.log"


def _write(file: Path, content: bytes) -> None:
    """Write a file that only its owner can read, since it may hold keys."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(content)
    file.chmod(0o600)


def _quote(word: str) -> str:
    """Return a word quoted for systemd, which then reads nothing in it as syntax."""
    escaped = _plain(word).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _plain(text: str) -> str:
    if not text.isprintable():
        raise _unwritable(text)
    return text.replace("%", "%%")


def _unwritable(text: str) -> ServiceError:
    """Return the error of a word or a variable that a service's file can't hold, without the variable's value."""
    return ServiceError(f"{text.partition('=')[0]!a} has a control character, such as a line break, or is no text")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ServiceError(f"{command[0]} is not on PATH") from error


def _check(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        output = " ".join((done.stderr or done.stdout).split())
        raise ServiceError(f"{shlex.join(done.args)} ended with status {done.returncode}: {output}")
