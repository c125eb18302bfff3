"""The work of `serve` after its options: one model or several, the port first, and the terminal's end outlived."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from mlx_specprefill import DtypeName, RankedEngine

from ...http.sockets import bound_sockets, is_exposed
from ...models.entry import entries_of
from ...models.loader import Loader
from ...models.pool import Models
from ...models.server_state import ServerState
from ...models.service import Service
from ...monitoring.logs import configure_logging
from ...pairs import Pair, read_table
from ...running.process import serve_models
from ...settings.pair import drop_unset, make_settings
from ...settings.server import Settings
from ..common import OptionError, one_line_errors
from ..loading import load_engine
from .ranks import follow, join

logger = logging.getLogger(__name__)


def run_server(
    chosen: Pair | Path, dtype: DtypeName, given: Mapping[str, Any], sockets: list[socket.socket] | None
) -> None:
    """Run the server as the options of `serve` say, until it ends.

    Args:
        chosen: the pair, or the table of several.
        given: options by the settings' names.
        sockets: bound to the address of the settings; None: of several ranks, the one that leads binds them.
    """
    with one_line_errors():
        if isinstance(chosen, Path):
            serve_several(chosen, dtype, given, sockets)
            return
        settings = make_settings(chosen, **given)
        configure_logging(settings.log_level, settings.log_format)
        outlive_the_terminal()
        ranks = join(settings)
        loading = partial(load_engine, chosen, dtype, settings, settings.serving_config(), calibrate=True, ranks=ranks)
        if ranks is not None and not ranks.leads:
            engine = loading()
            assert isinstance(engine, RankedEngine)
            follow(engine)
            return
        # First: loading takes minutes, and a port in use must be reported at once.
        with listening(settings, sockets) as sockets, loading() as engine:
            serve_models(Models.of(Service(engine, settings)), sockets)


def serve_several(file: Path, dtype: DtypeName, given: Mapping[str, Any], sockets: list[socket.socket] | None) -> None:
    """Serve the models of a table."""
    rows = read_table(file)
    settings = Settings(**drop_unset(given))
    entries = entries_of(rows, file, given)
    configure_logging(settings.log_level, settings.log_format)
    outlive_the_terminal()
    if join(settings) is not None:
        raise OptionError(f"several machines run one model, {file} names several: choose by --pair or --target")
    with listening(settings, sockets) as sockets:
        host = Loader(rows, file, settings.memory_limit, dtype)
        try:
            serve_models(Models(ServerState(settings), entries, host, settings.max_models), sockets)
        finally:
            host.close()


@contextmanager
def listening(settings: Settings, bound: list[socket.socket] | None) -> Iterator[list[socket.socket]]:
    """Take the bound sockets, or bind some, and say who can reach them without a key."""
    with nullcontext(bound) if bound else bound_sockets(settings.host, settings.port) as sockets:
        if is_exposed(sockets) and not (settings.api_keys or settings.admin_keys):
            logger.warning("every machine that can reach %s can use this server: set --api-key", settings.host)
        yield sockets


def outlive_the_terminal() -> None:
    """Ignore SIGHUP, so that closing the terminal does not end the server. SIGTERM does."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
