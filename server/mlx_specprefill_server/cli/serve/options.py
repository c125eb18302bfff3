"""The options of `serve` that fill settings, and its help: groups of options with defaults and variables."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter
from typing import Annotated, Any, get_origin

import typer
from pydantic import BeforeValidator
from typer.core import TyperCommand

from ...settings.server import Settings, description_of, flag_of, variable
from ..options import with_options

_MORE_FLAGS = {"specprefill_keep_pct": ("--specprefill-keep-pct",)}

EXAMPLES = (
    ("serve", "the default pair"),
    ("serve --target X --draft Y", "models of your own: folders, GGUF files or repository ids"),
    ("serve --host 0.0.0.0 --api-key K", "for other machines, too"),
)
GROUPS: dict[str, tuple[str, ...]] = {
    "Models": ("pair", "target", "draft", "config"),
    "Address and access": ("host", "port", "api_keys"),
    "Memory": ("memory_limit",),
    "Advanced: models": ("pairs_file", "max_models", "dtype", "kv_bits", "model_alias"),
    "Advanced: sparse prefill": (
        "specprefill",
        "specprefill_scope",
        "specprefill_threshold",
        "specprefill_keep_pct",
        "rule",
        "densify",
    ),
    "Advanced: answers": ("speculative", "template_kwargs"),
    "Advanced: memory and caches": (
        "prefix_cache_size",
        "prefix_cache_dir",
        "prefix_disk_size",
        "remember",
    ),
    "Advanced: access": ("admin_keys", "allowed_hosts"),
    "Advanced: logs": ("log_level",),
}


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with an option for each setting of GROUPS in place of its keyword parameter `given`."""
    names = [name for group in GROUPS.values() for name in group if name in Settings.model_fields]
    return with_options(command, "given", {name: _parameter(name) for name in names}, dict)


def _parameter(name: str) -> Parameter:
    """Return the option of `serve` for a setting. The setting itself parses what is no plain number, word or path."""
    field, flags = Settings.model_fields[name], [flag_of(name), *_MORE_FLAGS.get(name, ())]
    kind: Any = field.annotation
    if get_origin(kind) is tuple:
        kind = list[str]
    elif any(isinstance(step, BeforeValidator) for step in field.metadata):
        kind = str
    elif field.default is True:
        flags = [f"{flags[0]}/--no-{flags[0].removeprefix('--')}"]
    option = typer.Option(*flags, help=description_of(name))
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])


class SettingsCommand(TyperCommand):
    """A command whose parameters have their settings' names."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        super().format_help_text(ctx, formatter)
        with formatter.section("Examples"):
            formatter.write_dl([(f"mlx-specprefill {words}", text) for words, text in EXAMPLES])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        parameters = {str(parameter.name): parameter for parameter in self.get_params(ctx)}
        for group, names in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([_record(ctx, name, parameters.pop(name)) for name in names if name in parameters])
        with formatter.section("Other"):
            formatter.write_dl([_record(ctx, name, parameter) for name, parameter in parameters.items()])
        with formatter.section("Settings without an option"):
            options = {parameter.name for parameter in self.params}
            others = [name for name in Settings.model_fields if name not in options]
            formatter.write_dl([(variable(name), description_of(name)) for name in others])


def _record(ctx: Any, name: str, parameter: Any) -> tuple[str, str]:
    spelled, text = parameter.get_help_record(ctx)
    return spelled, f"{text} [{variable(name)}]" if name in Settings.model_fields else text
