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
from typing import Any, NoReturn
from urllib.parse import urlsplit

import typer

from ..common import LOCAL, OptionError, ask_server
from ..options import PairOptions
from .setup import Setup

_CONNECT_S, _POLL_S, _ENDING_S = 2.0, 0.2, 60.0
_ENDINGS = [getattr(signal, name) for name in ("SIGHUP", "SIGTERM") if hasattr(signal, name)]


def write_files(setup: Setup) -> None:
    """Write an agent's files, which hold a key, for this user only."""
    for name, text in setup.files.items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        path.write_text(text, encoding="utf-8")


def program_of(agent: str) -> str:
    """Return the path of an agent's program; an OptionError if it is not installed."""
    program = shutil.which(agent)
    if program is None:
        raise OptionError(f"{agent} is not installed, or not on the PATH")
    return program


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run an agent in this terminal and return its exit status, as a shell does. Ctrl-C is the agent's while it runs.

    No proxy of the environment comes between the agent and this machine.
    """
    agent = subprocess.Popen(command, env={**os.environ, **environment, **_past_proxies()})
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        status = agent.wait()
    except SystemExit:
        agent.terminate()
        raise
    finally:
        signal.signal(signal.SIGINT, before)
    return status if status >= 0 else 128 - status


def _past_proxies() -> dict[str, str]:
    """Return the variables by which this machine is asked without a proxy, and what they say already."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    past = given if given == "*" else ",".join(filter(None, (given, *LOCAL)))
    return {"no_proxy": past, "NO_PROXY": past}


def _leave(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


class Serving:
    """A block in which a server runs at an address. One that it starts ends with it, also if the terminal is closed.

    Args:
        models: of the server that it starts.
        key: that it asks for.

    Raises:
        OptionError: there is no such address.
    """

    def __init__(self, url: str, models: PairOptions, key: str | None) -> None:
        try:
            address = urlsplit(url)
            self._host, self._port = address.hostname or "", address.port or 80
        except ValueError as error:
            raise OptionError(f"{url}: {error}") from error
        self._url, self._models, self._key = url, models, key
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        host, port = self._host, self._port
        if host not in LOCAL or _listens(host, port):
            return
        log = Path.home() / ".cache" / "mlx-specprefill" / f"server-{port}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        typer.echo(f"note: no server runs at {self._url}: starting one; its log is {log}", err=True)
        named = {name.replace("_", "-"): value for name, value in asdict(self._models).items() if value}
        options = [f"--{name}={value}" for name, value in named.items()]
        command = [sys.executable, "-m", __package__.partition(".")[0], "serve", f"--host={host}", f"--port={port}"]
        environment = os.environ | ({} if self._key is None else {"MLX_SPECPREFILL_API_KEYS": self._key})
        self._before = {n: signal.signal(n, _leave) for n in _ENDINGS if signal.getsignal(n) is not signal.SIG_IGN}
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
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except OSError:
        return False
    return True
