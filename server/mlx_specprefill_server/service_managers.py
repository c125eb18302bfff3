"""The server as a service of the user who installs it: launchd on macOS, systemd on Linux."""

from __future__ import annotations

import os
import plistlib
import shlex
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["Launchd", "ServiceError", "ServiceManager", "Systemd", "manager"]

NAME = "mlx-specprefill"
RESTART_S = 30  # after a failure
STOP_S = 40  # requests get 30 s of these to finish, unless --shutdown-grace says otherwise


class ServiceError(Exception):
    """The service can't be managed; says what to do."""


class ServiceManager(ABC):
    """Writes one file and tells the system's service manager of it.

    Attributes:
        file: what `install` writes, readable by its owner only, since it may hold keys.
    """

    file: Path

    def install(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Write the file and start the service, now and at every login; what was installed before is replaced.

        Raises:
            ServiceError: a value has a line break, or the manager refuses it.
        """
        text = self.text(command, environment)
        if self.file.exists():
            self._forget()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
        self.file.chmod(0o600)
        self._start()

    def remove(self) -> None:
        """Stop the service and delete its file.

        Raises:
            ServiceError: it is not installed.
        """
        self.need()
        self._forget()
        self.file.unlink()
        self._reload()

    def need(self) -> None:
        """Raises ServiceError: it is not installed."""
        if not self.file.exists():
            raise ServiceError(f"the service is not installed: {NAME} service install")

    @abstractmethod
    def text(self, command: Sequence[str], environment: Mapping[str, str]) -> bytes:
        """The file for a command, whose first word is an absolute path; it is run in this process's folder."""

    @abstractmethod
    def status_command(self) -> list[str]:
        """What prints the state."""

    @abstractmethod
    def logs_command(self, lines: int, follow: bool) -> list[str]:
        """What prints the last lines of the log."""

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _forget(self) -> None:
        """Stop it, whether it runs or not."""

    @abstractmethod
    def _reload(self, may_fail: bool = True) -> None:
        """Tell the manager that its file has changed or is gone."""


class Systemd(ServiceManager):
    """A unit of the user's systemd."""

    def __init__(self) -> None:
        config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        self.file = config / "systemd" / "user" / f"{NAME}.service"

    def text(self, command: Sequence[str], environment: Mapping[str, str]) -> bytes:
        variables = "".join(
            f"Environment={_quoted(f'{name}={value}')}\n" for name, value in sorted(environment.items())
        )
        words = " ".join(_quoted(word).replace("$", "$$") for word in command)
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

    def status_command(self) -> list[str]:
        return ["systemctl", "--user", "status", "--no-pager", f"{NAME}.service"]

    def logs_command(self, lines: int, follow: bool) -> list[str]:
        return ["journalctl", "--user", f"--unit={NAME}.service", f"--lines={lines}", *(["--follow"] if follow else [])]

    def _start(self) -> None:
        self._reload(may_fail=False)
        _run("systemctl", "--user", "enable", "--now", f"{NAME}.service")

    def _forget(self) -> None:
        _run("systemctl", "--user", "disable", "--now", f"{NAME}.service", may_fail=True)

    def _reload(self, may_fail: bool = True) -> None:
        _run("systemctl", "--user", "daemon-reload", may_fail=may_fail)


class Launchd(ServiceManager):
    """An agent of the user's launchd."""

    def __init__(self) -> None:
        self.file = Path.home() / "Library" / "LaunchAgents" / f"{NAME}.plist"
        self.log = Path.home() / "Library" / "Logs" / f"{NAME}.log"
        self._domain = f"gui/{os.getuid()}"

    def text(self, command: Sequence[str], environment: Mapping[str, str]) -> bytes:
        return plistlib.dumps(
            {
                "Label": NAME,
                "ProgramArguments": list(command),
                "WorkingDirectory": str(Path.cwd()),
                "EnvironmentVariables": dict(environment),
                "RunAtLoad": True,
                "KeepAlive": {"SuccessfulExit": False},
                "ThrottleInterval": RESTART_S,
                "ExitTimeOut": STOP_S,
                "ProcessType": "Interactive",  # a background process gets the slow cores
                "StandardOutPath": str(self.log),
                "StandardErrorPath": str(self.log),
                "Umask": 0o077,
            }
        )

    def status_command(self) -> list[str]:
        return ["launchctl", "print", f"{self._domain}/{NAME}"]

    def logs_command(self, lines: int, follow: bool) -> list[str]:
        return ["tail", f"-n{lines}", *(["-F"] if follow else []), str(self.log)]

    def _start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        _run("launchctl", "bootstrap", self._domain, str(self.file))

    def _forget(self) -> None:
        _run("launchctl", "bootout", f"{self._domain}/{NAME}", may_fail=True)

    def _reload(self, may_fail: bool = True) -> None:
        """launchd reads the file when it is bootstrapped."""


def manager() -> ServiceManager:
    """The one of this system.

    Raises:
        ServiceError: it has none that is known here.
    """
    if sys.platform == "darwin":
        return Launchd()
    if sys.platform.startswith("linux") and shutil.which("systemctl") is not None:
        return Systemd()
    raise ServiceError("services need launchd (macOS) or systemd (Linux); start `mlx-specprefill serve` by other means")


def _quoted(word: str) -> str:
    """A word for systemd, with nothing in it that it would read as more than text."""
    escaped = _plain(word).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _plain(text: str) -> str:
    if not text.isprintable():
        raise ServiceError(f"{text!r} has a line break or a control character, which a unit file can't hold")
    return text.replace("%", "%%")


def _run(*command: str, may_fail: bool = False) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ServiceError(f"{command[0]} is not on PATH") from error
    if done.returncode and not may_fail:
        said = " ".join((done.stderr or done.stdout).split())
        raise ServiceError(f"{shlex.join(command)} ended with status {done.returncode}: {said}")
