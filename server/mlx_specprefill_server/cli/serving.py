"""`mlx-specprefill serve`."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_specprefill import DraftPlacement, RankedEngine, Scope, SpeculationName, WiredLimit

from ..app import serve as serve_forever
from ..app import serve_models
from ..connections import bound_sockets, is_exposed
from ..models.loader import Loader, entries_of, models_file, read_table
from ..models.models import Models
from ..monitoring.access_log import configure_logging
from ..pair_loading import only_given
from ..service import ServerState
from ..settings import Densify, LogLevel, Settings
from .common import OptionError, choose, make_settings, note_environment, one_line_errors
from .grouped import SettingsCommand
from .loading import load_engine
from .options import Draft, Dtype, DtypeName, KvBits, NoDraft, PairName, PairsFile, PrefillStep, Rule, Target, setting
from .several import end_together, follow, join, launch, without

_OF_ONE_MODEL = ("pair", "pairs_file", "target", "draft", "no_draft", "model_alias")

logger = logging.getLogger(__name__)

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_OF_THE_PAIR = (
    "pair",
    "pairs_file",
    "target",
    "draft",
    "no_draft",
    "dtype",
    "config",
    "hosts",
    "starting_port",
)  # every other parameter has its setting's name


@app.command(cls=SettingsCommand)
def serve(
    context: typer.Context,
    pair: PairName = None,
    pairs_file: PairsFile = None,
    target: Target = None,
    draft: Draft = None,
    no_draft: NoDraft = False,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Table of several models, each loaded on its first request. Default: models.toml in "
            "~/.config/mlx-specprefill, if it exists and no model is named."
        ),
    ] = None,
    max_models: Annotated[
        int | None,
        typer.Option(help="Largest number of the table's models in memory. Default: as many as fit."),
    ] = None,
    host: Annotated[str | None, setting("host", "Address to listen on.")] = None,
    port: Annotated[int | None, setting("port", "Port to listen on; 0: any free port.")] = None,
    dtype: Dtype = "auto",
    specprefill_threshold: Annotated[
        int | None,
        typer.Option(
            help="Prefill prompts with more uncached tokens than this sparsely. Default: if it saves enough time, by "
            "learnt costs."
        ),
    ] = None,
    specprefill_keep_pct: Annotated[
        str | None,
        setting(
            "specprefill_keep_pct",
            "Share of chunks to keep, in (0, 1].",
            "--specprefill-keep-pct",
            "--keep-pct",
        ),
    ] = None,
    specprefill: Annotated[
        bool | None,
        typer.Option("--specprefill/--no-specprefill", help="Prefill long prompts sparsely. Off: only on request."),
    ] = None,
    specprefill_scope: Annotated[
        Scope | None,
        setting(
            "specprefill_scope",
            "Text that may be dropped. user: user text only. all: also the middle of a long system prompt.",
        ),
    ] = None,
    rule: Rule = None,
    speculative: Annotated[
        SpeculationName | None,
        setting("speculative", "Strategy of speculative decoding."),
    ] = None,
    prefill_step: PrefillStep = None,
    max_rows: Annotated[
        int | None, setting("max_rows", "Largest number of requests that run at the same time.")
    ] = None,
    target_itl_ms: Annotated[
        float | None, setting("target_itl_ms", "Milliseconds by which a prefill may delay a running answer.")
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            help="Memory for weights, requests and caches, like 48GB. Default: the recommendation of the device."
        ),
    ] = None,
    wired_limit: Annotated[
        WiredLimit | None,
        setting(
            "wired_limit", "Memory that macOS keeps resident. auto: the models, if they take more than 60 % of it."
        ),
    ] = None,
    prefix_cache_size: Annotated[
        str | None, setting("prefix_cache_size", "Memory for reusable prompt prefixes; 0: none.")
    ] = None,
    prefix_cache_dir: Annotated[
        Path | None, typer.Option(help="Folder that keeps prefixes when the server stops. Default: none.")
    ] = None,
    prefix_disk_size: Annotated[str | None, setting("prefix_disk_size", "Disk space for that folder.")] = None,
    remember: Annotated[
        bool | None,
        setting(
            "remember",
            "Keep shared system prompts and tools on disk, readable by this user only.",
            "--remember/--no-remember",
        ),
    ] = None,
    densify: Annotated[
        Densify | None,
        setting(
            "densify",
            "Prefill sparse prompts in full in idle time. auto: not on battery.",
        ),
    ] = None,
    kv_bits: KvBits = None,
    api_keys: Annotated[
        list[str] | None, typer.Option("--api-key", help="Require this API key; repeat for more.")
    ] = None,
    admin_keys: Annotated[
        list[str] | None,
        typer.Option(
            "--admin-key", help="API key that also sees the cached prompts of the other keys; repeat for more."
        ),
    ] = None,
    allow_special_tokens: Annotated[
        bool | None,
        typer.Option(
            "--allow-special-tokens", help="Read names of control tokens in messages as these tokens. Default: as text."
        ),
    ] = None,
    model_alias: Annotated[str | None, typer.Option(help="Model id that clients see.")] = None,
    allowed_hosts: Annotated[
        list[str] | None, typer.Option("--allowed-host", help="Further allowed Host name; repeat for more; *: any.")
    ] = None,
    hosts: Annotated[
        Path | None,
        typer.Option(help="File of the machines that run one model together, in the format of mlx.launch."),
    ] = None,
    starting_port: Annotated[
        int | None, typer.Option(help="First port between these machines, as in mlx.launch; 32323 if not given.")
    ] = None,
    draft_placement: Annotated[
        DraftPlacement | None,
        setting("draft_placement", "Place of the draft: on the first machine, or a part of it on each."),
    ] = None,
    log_level: Annotated[LogLevel | None, setting("log_level", "Lowest level that is logged.")] = None,
) -> None:
    """Start the OpenAI-compatible server. Every setting also has an environment variable: MLX_SPECPREFILL_PORT, ..."""
    note_environment()
    given: dict[str, Any] = {name: value for name, value in context.params.items() if name not in _OF_THE_PAIR}
    named = {name: value for name in _OF_ONE_MODEL if (value := context.params[name])}
    with one_line_errors():
        table = _table(config, named)
        if hosts is not None:
            if table is not None:
                raise OptionError(f"--hosts runs one model, {table} names several: choose by --pair or --target")
            configure_logging(given["log_level"] or "info")
            raise typer.Exit(launch(hosts, without(sys.argv[1:], "--hosts", "--starting-port"), starting_port))
        if table is not None:
            serve_several(table, dtype, given)
            return
        chosen = choose(pair, pairs_file, target, draft, no_draft)
        settings = make_settings(chosen, **given)
        configure_logging(settings.log_level, settings.log_format)
        outlive_the_terminal()
        ranks = join(settings)
        loading = partial(load_engine, chosen, dtype, settings, settings.serving_config(), calibrate=True, ranks=ranks)
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
                serve_forever(engine, settings, sockets)
            if ranks is not None:
                ranks.close()


def _table(config: Path | None, named: dict[str, Any]) -> Path | None:
    """Return the table of several models if the options name one.

    Raises:
        OptionError: options name one model, too.
    """
    if config is not None and named:
        raise OptionError(f"--config and --{next(iter(named)).replace('_', '-')} exclude each other")
    return config or (models_file() if not named and models_file().is_file() else None)


def serve_several(file: Path, dtype: DtypeName, given: dict[str, Any]) -> None:
    """Serve the models of a table."""
    rows = read_table(file)
    settings = Settings(**only_given(given))
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
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
