"""The options of `mlx-specprefill serve`. The server's own module is imported once they are read."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_specprefill import DraftPlacement, Scope, SpeculationName

from ..settings import Densify, LogLevel
from .options import KvBits, PairOptions, PrefillStep, Rule, SettingsCommand, setting, takes_pair

_OF_ONE_MODEL = ("pair", "pairs_file", "target", "draft", "no_draft", "model_alias")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_WITHOUT_SETTING = {*_OF_ONE_MODEL, "dtype", "config", "hosts", "starting_port"} - {"model_alias"}


@app.command(cls=SettingsCommand)
@takes_pair
def serve(
    context: typer.Context,
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
    max_differ: Annotated[
        float | None,
        setting("max_differ", 'With keep_pct "auto": largest part of answers that may differ from full reading.'),
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
    *,
    models: PairOptions,
) -> None:
    """Start the OpenAI-compatible server. Every setting also has an environment variable: MLX_SPECPREFILL_PORT, ..."""
    given: dict[str, Any] = {name: value for name, value in context.params.items() if name not in _WITHOUT_SETTING}
    named = {name: value for name in _OF_ONE_MODEL if (value := context.params[name])}
    server = import_module(".run_server", __package__)
    server.run_server(models, named, given, config, hosts, starting_port)
