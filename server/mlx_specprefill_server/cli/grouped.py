"""The help of `serve`: options in groups, each with its default and its environment variable."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand

from ..settings import Settings, default_text, variable

__all__ = ["GROUPS", "SettingsCommand"]

GROUPS: dict[str, tuple[str, ...]] = {
    "Models": (
        "pair",
        "pairs_file",
        "target",
        "draft",
        "no_draft",
        "config",
        "max_models",
        "dtype",
        "kv_bits",
        "model_alias",
    ),
    "Sparse prefill": (
        "specprefill",
        "specprefill_scope",
        "specprefill_threshold",
        "specprefill_keep_pct",
        "rule",
        "densify",
    ),
    "Answers": ("speculative", "prefill_step", "max_rows", "target_itl_ms"),
    "Memory and caches": (
        "memory_limit",
        "wired_limit",
        "prefix_cache_size",
        "prefix_cache_dir",
        "prefix_disk_size",
        "remember",
    ),
    "Address and access": (
        "host",
        "port",
        "api_keys",
        "admin_keys",
        "allowed_hosts",
        "allow_special_tokens",
    ),
    "Several machines": ("hosts", "starting_port", "draft_placement"),
    "Logs": ("log_level",),
}


class SettingsCommand(TyperCommand):
    """A command whose parameters have their settings' names."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        parameters = {str(parameter.name): parameter for parameter in self.get_params(ctx)}
        for group, names in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([_record(ctx, name, parameters.pop(name)) for name in names if name in parameters])
        with formatter.section("Other"):
            formatter.write_dl([_record(ctx, name, parameter) for name, parameter in parameters.items()])
        with formatter.section("Settings without an option"):
            formatter.write_dl(list(_without_option({str(parameter.name) for parameter in self.params})))


def _record(ctx: Any, name: str, parameter: Any) -> tuple[str, str]:
    spelled, text = parameter.get_help_record(ctx)
    return spelled, _with_setting(name, text) if name in Settings.model_fields else text


def _with_setting(name: str, text: str) -> str:
    default = "" if re.search("Default[: ]", text) else f" Default {default_text(name)}."
    return f"{text}{default} [{variable(name)}]"


def _without_option(options: set[str]) -> Iterator[tuple[str, str]]:
    for name, field in Settings.model_fields.items():
        if name not in options:
            yield variable(name), _with_setting(name, field.description or "").rpartition(" [")[0]
