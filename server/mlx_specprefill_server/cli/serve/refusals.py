"""Refusals of `serve` before it imports the server: options that exclude each other, missing models, a taken port."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from ...http.sockets import bound_sockets
from ...pairs import Pair, models_file, read_table
from ...settings.pair import drop_unset, make_settings
from ...settings.server import Settings
from ..common import OptionError, choose_here, note_environment, one_line_errors
from ..options import PairOptions

_RANK_VARIABLES = ("MLX_RANK", "OMPI_COMM_WORLD_RANK")  # set in processes that run one model together


def start(models: PairOptions, named: Sequence[str], given: Mapping[str, Any], config: Path | None) -> None:
    """Check the options of `serve`, then run the server.

    Args:
        models: the pair, where the options name one.
        named: the given options that name one model.
        given: options by the settings' names.
        config: table of several models.
    """
    note_environment()
    with ExitStack() as bound, one_line_errors():
        what: Pair | Path = _table(config, named) or choose_here(models)
        # These refuse what the options can't mean.
        settings = make_settings(what, **given) if isinstance(what, Pair) else Settings(**drop_unset(given))
        sockets = None
        if not any(name in os.environ for name in _RANK_VARIABLES):  # else rank 0 alone listens
            sockets = bound.enter_context(bound_sockets(settings.host, settings.port))
        work = import_module(".run_server", __package__)
        work.run_server(what, models.dtype, given, sockets)


def _table(config: Path | None, named: Sequence[str]) -> Path | None:
    """Return the table of several models if the options name one. Refuse mistakes in it, and options that name one
    model as well.
    """
    if config is not None and named:
        raise OptionError(f"--config and --{named[0].replace('_', '-')} exclude each other")
    table = config or (models_file() if not named and models_file().is_file() else None)
    if table is not None:
        read_table(table)
    return table
