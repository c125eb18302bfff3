"""One model over several machines: `mlx.launch` starts the ranks, which join, follow rank 0 and end together."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from mlx_specprefill import RANK_KEY_VARIABLE, PeerLostError, RankedEngine, Ranks, SettingsError, join_ranks

from ..process import LOST_STATUS, TELLING_S
from ..settings import ENV_PREFIX, SECRETS, Settings, variable

logger = logging.getLogger(__name__)

LAUNCHED_VARIABLE = f"{ENV_PREFIX}LAUNCHED"
_PEER_TIMEOUT_S = 60.0  # seconds of silence after which another machine counts as lost
_ASKS = {signal.SIGTERM: b"end\n", signal.SIGINT: b"stop\n"}  # input from the launcher by signal


def launch(hosts: Path, arguments: Sequence[str], starting_port: int | None) -> int:
    """Run this command on all hosts with `mlx.launch` until it ends. Return the exit status.

    Args:
        hosts: MLX's hostfile.
        arguments: of this command, without those that are meant for the launcher.

    Raises:
        SettingsError: the file is no hostfile, or there is no `mlx.launch`.
    """
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
    settings |= {LAUNCHED_VARIABLE: "1", RANK_KEY_VARIABLE: os.environ.get(RANK_KEY_VARIABLE) or secrets.token_hex()}
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
