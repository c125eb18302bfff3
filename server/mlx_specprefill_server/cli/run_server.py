"""The work of `serve` after its options: one model or several, on one machine or on several, and its exit status."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from mlx_specprefill import DtypeName, PeerLostError, RankedEngine, Ranks, SettingsError, join_ranks

from ..connections import bound_sockets, is_exposed
from ..models.loader import Loader, entries_of, models_file, read_table
from ..models.models import Models
from ..monitoring.logs import configure_logging
from ..pair_loading import drop_unset, make_settings
from ..process import LOST_STATUS, TELLING_S, serve_models
from ..server_state import ServerState
from ..service import Service
from ..settings import ENV_PREFIX, SECRETS, Settings, variable
from .common import OptionError, choose, note_environment, one_line_errors
from .options import PairOptions
from .pull import load_engine

logger = logging.getLogger(__name__)

LAUNCHED_VARIABLE = f"{ENV_PREFIX}LAUNCHED"
KEY_VARIABLE = f"{ENV_PREFIX}RANK_KEY"
_PEER_TIMEOUT_S = 60.0  # seconds of silence after which another machine counts as lost
_ASKS = {signal.SIGTERM: b"end\n", signal.SIGINT: b"stop\n"}  # input from the launcher by signal


# --- the command that starts the others ------------------------------------------------------------------------------


def launch(hosts: Path, arguments: Sequence[str], starting_port: int | None) -> int:
    """Run this command on all hosts with `mlx.launch` until it ends. Return the exit status.

    Args:
        hosts: MLX's hostfile.
        arguments: of this command, without those that are meant for the launcher.

    Raises:
        SettingsError: there is no such file, or no `mlx.launch`.
    """
    if not hosts.is_file():
        raise SettingsError(f"--hosts {hosts}: there is no such file; mlx.distributed_config makes one")
    logger.info("starting %s", ", ".join(f"rank {rank} on {host}" for rank, host in enumerate(_read_hosts(hosts))))
    launcher = Path(sys.executable).with_name("mlx.launch")
    if not launcher.is_file():
        raise SettingsError(f"{launcher} is missing: it comes with the package mlx")
    port = () if starting_port is None else ("--starting-port", str(starting_port))
    own = (sys.executable, "-m", "mlx_specprefill_server", *arguments)
    command = [str(launcher), "--hostfile", str(hosts), *port, *_environment(), "--", *own]
    # Its input stays open: it polls it, and the ranks take its end for the end of the launcher.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        is_ending = _pass_on_signals(process)
        status = process.wait()
    return 0 if is_ending() else status or LOST_STATUS  # a server that ends by itself has failed


def _read_hosts(hosts: Path) -> list[str]:
    """Return the hosts of a hostfile; raises SettingsError."""
    try:
        hostfile = json.loads(hosts.read_text(encoding="utf-8"))
        return [str(host["ssh"]) for host in (hostfile["hosts"] if isinstance(hostfile, dict) else hostfile)]
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"--hosts {hosts}: this is no hostfile of MLX's: {error}") from error


def _environment() -> list[str]:
    """Return the arguments by which mlx.launch sets this machine's settings and the ranks' shared key on all hosts."""
    secret = {variable(name) for name in SECRETS}  # must not appear in a command line
    settings = {name: os.environ[name] for name in os.environ.keys() - secret if name.startswith(ENV_PREFIX)}
    settings |= {LAUNCHED_VARIABLE: "1", KEY_VARIABLE: os.environ.get(KEY_VARIABLE) or secrets.token_hex()}
    return [part for name, value in settings.items() for part in ("--env", f"{name}={value}")]


def _pass_on_signals(process: subprocess.Popen[bytes]) -> Callable[[], bool]:
    """Pass signals on through the launcher's input, which reaches other machines too. Return whether there was one."""
    received: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        received.append(number)
        if process.stdin is not None:
            process.stdin.write(_ASKS[signal.Signals(number)])
            process.stdin.flush()

    for number in _ASKS:
        signal.signal(number, handle)
    return lambda: bool(received)


def without(arguments: Sequence[str], *options: str) -> list[str]:
    """Return the arguments without these options and their values."""
    kept, skip = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if not skip and name not in options:
            kept.append(argument)
        skip = not skip and name in options and not equals
    return kept


# --- the ranks -------------------------------------------------------------------------------------------------------


def join(settings: Settings) -> Ranks | None:
    """Join the processes that mlx.launch has started with this one. Return None if there are none.

    Raises:
        LoadError: a rank is missing, or has other versions or settings.
    """
    # Settings that may differ between machines: paths and memory.
    config = replace(settings.engine_config(), prefix_cache_dir=None, calibration_file=None, memory_limit=None)
    same = {"engine settings": str(config), "draft placement": settings.draft_placement}
    return join_ranks(_PEER_TIMEOUT_S, same)


def end_together(ranks: Ranks) -> None:
    """End with the other ranks. Rank 0 first ends the waiting requests with an error."""
    ranks.on_lost(lambda lost: _end(lost, TELLING_S if ranks.leads else 0.0))
    if ranks.leads and LAUNCHED_VARIABLE in os.environ:
        threading.Thread(target=_obey, name="mlx-specprefill-launcher", daemon=True).start()


def follow(engine: RankedEngine, ranks: Ranks) -> None:
    """Follow rank 0 on another rank until it ends."""
    for number in _ASKS:
        # rank 0 gets the signal too, lets its requests finish, and ends this rank
        signal.signal(number, signal.SIG_IGN)
    logger.info("process %d is rank %d of %d and follows rank 0", os.getpid(), ranks.rank, ranks.size)
    engine.follow()
    ranks.close()


def _obey() -> None:
    """Act on the launcher's messages. The end of its input asks this process to stop."""
    for line in sys.stdin.buffer:
        number = next((number for number, asks in _ASKS.items() if line.strip() == asks.strip()), None)
        if number is not None:
            os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGTERM)


def _end(lost: PeerLostError, after_s: float) -> None:
    """End this process at once. The MLX thread may wait for the lost process for ever."""
    time.sleep(after_s)
    logger.error("%s: this process ends with exit status %d", lost, LOST_STATUS)
    logging.shutdown()
    os._exit(LOST_STATUS)


# --- the server ------------------------------------------------------------------------------------------------------


def run_server(
    models: PairOptions,
    named: Sequence[str],
    given: Mapping[str, Any],
    config: Path | None,
    hosts: Path | None,
    starting_port: int | None,
) -> None:
    """Run the server as the options of `serve` say, until it ends.

    Args:
        models: the pair, where the options name one.
        named: the given options that name one model.
        given: options by the settings' names.
        config: table of several models.
        hosts: MLX's hostfile, if the ranks are to be started.
        starting_port: first port between them.
    """
    note_environment()
    with one_line_errors():
        table = _table(config, named)
        if hosts is not None:
            if table is not None:
                raise OptionError(f"--hosts runs one model, {table} names several: choose by --pair or --target")
            configure_logging(given["log_level"] or "info")
            raise typer.Exit(launch(hosts, without(sys.argv[1:], "--hosts", "--starting-port"), starting_port))
        if table is not None:
            serve_several(table, models.dtype, given)
            return
        chosen = choose(models)
        settings = make_settings(chosen, **given)
        configure_logging(settings.log_level, settings.log_format)
        outlive_the_terminal()
        ranks = join(settings)
        loading = partial(
            load_engine, chosen, models.dtype, settings, settings.serving_config(), calibrate=True, ranks=ranks
        )
        if ranks is not None:
            end_together(ranks)
            if not ranks.leads:
                engine = loading()
                assert isinstance(engine, RankedEngine)
                follow(engine, ranks)
                return
        # First: loading takes minutes, and a port in use must be reported at once.
        with listening(settings) as sockets:
            with loading() as engine:
                serve_models(Models.of(Service(engine, settings)), sockets)
            if ranks is not None:
                ranks.close()


def _table(config: Path | None, named: Sequence[str]) -> Path | None:
    """Return the table of several models if the options name one. Refuse options that name one model as well."""
    if config is not None and named:
        raise OptionError(f"--config and --{named[0].replace('_', '-')} exclude each other")
    return config or (models_file() if not named and models_file().is_file() else None)


def serve_several(file: Path, dtype: DtypeName, given: Mapping[str, Any]) -> None:
    """Serve the models of a table."""
    rows = read_table(file)
    settings = Settings(**drop_unset(given))
    entries = entries_of(rows, file, given)
    configure_logging(settings.log_level, settings.log_format)
    outlive_the_terminal()
    if join(settings) is not None:
        raise OptionError(f"several machines run one model, {file} names several: choose by --pair or --target")
    with listening(settings) as sockets:
        host = Loader(rows, file, settings.memory_limit, dtype)
        try:
            serve_models(Models(ServerState(settings), entries, host, settings.max_models), sockets)
        finally:
            host.close()


@contextmanager
def listening(settings: Settings) -> Iterator[list[socket.socket]]:
    """Bind the sockets, and say who can reach them without a key."""
    with bound_sockets(settings.host, settings.port) as sockets:
        if is_exposed(sockets) and not (settings.api_keys or settings.admin_keys):
            logger.warning("every machine that can reach %s can use this server: set --api-key", settings.host)
        yield sockets


def outlive_the_terminal() -> None:
    """Ignore SIGHUP, so that closing the terminal does not end the server. SIGTERM does."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
