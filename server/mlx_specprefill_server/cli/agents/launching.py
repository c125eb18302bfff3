"""Runs an agent on a server, and starts the server where none runs."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import typer

from ..common import OptionError, ask_server
from ..options import PairOptions
from .setup import Setup

_LOCAL = ("127.0.0.1", "localhost", "::1")
_CONNECT_S, _POLL_S, _ENDING_S = 2.0, 0.2, 60.0
_LOG = "server.log"


def write_files(setup: Setup) -> None:
    """Write an agent's files, which hold a key, for this user only."""
    for name, text in setup.files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run an agent in this terminal and return its exit status. Ctrl-C is the agent's while it runs.

    Raises:
        OptionError: it is not installed.
    """
    program = shutil.which(command[0])
    if program is None:
        raise OptionError(f"{command[0]} is not installed, or not on the PATH")
    with subprocess.Popen([program, *command[1:]], env={**os.environ, **environment}) as agent:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return agent.wait()
        finally:
            signal.signal(signal.SIGINT, before)


class Serving:
    """A block in which a server runs at an address. One that it starts ends with it.

    Args:
        models: of the server that it starts.
        key: that it asks for.
    """

    def __init__(self, url: str, models: PairOptions, key: str | None) -> None:
        self._address = urlsplit(url)
        self._url, self._models, self._key = url, models, key
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> None:
        host, port = self._address.hostname or "", self._address.port or 80
        if host not in _LOCAL or _listens(host, port):
            return
        log = Path.home() / ".cache" / "mlx-specprefill" / _LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        typer.echo(f"note: no server runs at {self._url}: starting one; its log is {log}", err=True)
        named = {name.replace("_", "-"): value for name, value in asdict(self._models).items() if value}
        options = [f"--{name}={value}" for name, value in named.items()]
        command = [sys.executable, "-m", __package__.partition(".")[0], "serve", f"--host={host}", f"--port={port}"]
        environment = os.environ | ({} if self._key is None else {"MLX_SPECPREFILL_API_KEYS": self._key})
        with log.open("wb") as out:  # in a session of its own: Ctrl-C in the terminal is the agent's
            self._process = subprocess.Popen(
                [*command, *options], stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=environment
            )
        try:
            while not _listens(host, port):
                if self._process.poll() is not None:
                    last = (log.read_text(encoding="utf-8", errors="replace").strip() or "no word").splitlines()[-1]
                    raise OptionError(f"the server could not be started: {last}")
                time.sleep(_POLL_S)
            ask_server(self._url, "/v1/models", self._key, "data")
        except BaseException:
            self._end()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)
        self._process.kill()


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except OSError:
        return False
    return True
