"""Options that several commands share, and the help of `serve`: groups of options with defaults and variables."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mlx_specprefill import DtypeName, RuleName

from ..settings import LogLevel, Settings, default_text, variable


def setting(name: str, help: str, *flags: str, **more: Any) -> Any:
    """Return an option that fills setting `name`. Its help ends with the setting's default."""
    return typer.Option(*flags, help=f"{help} Default {default_text(name)}.", **more)


PairsFile = Annotated[Path | None, typer.Option(help="File of your own named pairs for --pair.")]


@dataclass(frozen=True, slots=True)
class PairOptions:
    """The options that name a pair."""

    pair: Annotated[
        str | None,
        typer.Option(help="A named pair, as `list` shows them. Default: smollm2 if it is installed, else demo."),
    ] = None
    pairs_file: PairsFile = None
    target: Annotated[
        str | None, typer.Option(help="Target model: folder, GGUF file or repository id. Not with --pair.")
    ] = None
    draft: Annotated[
        str | None,
        typer.Option(
            help="Draft model: folder, GGUF file or repository id. self: the target's first layers. "
            "Default: self, if the target can be prefilled in stages."
        ),
    ] = None
    no_draft: Annotated[
        bool,
        typer.Option(
            "--no-draft", help="Score prompts with the target's own first layers, also in a pair with a draft."
        ),
    ] = False
    dtype: Annotated[DtypeName, typer.Option(help="auto: as stored on a GPU, float32 on a CPU.")] = "auto"


def takes_pair(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the options of PairOptions in place of its keyword parameter `models`."""

    @wraps(command)
    def run(**given: Any) -> None:
        options = {name: given.pop(name) for name in _PAIR}
        command(**given, models=PairOptions(**options))

    signature = inspect.signature(command, eval_str=True)
    others = [parameter for parameter in signature.parameters.values() if parameter.name != "models"]
    keywords = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in (*others, *_PAIR.values())]
    run.__signature__ = signature.replace(parameters=keywords)  # type: ignore[attr-defined] # typer reads it
    return run


_PAIR = inspect.signature(PairOptions, eval_str=True).parameters

Rule = Annotated[
    RuleName | None,
    typer.Option(
        help="Rule that scores and selects tokens. default: calibrated heads. paper: as SpecPrefill was published."
    ),
]
PrefillStep = Annotated[int | None, typer.Option(help="Tokens per target forward.")]
KvBits = Annotated[int | None, typer.Option(help="Quantise the target's KV cache after prefill: 2, 3, 4, 5, 6 or 8.")]
Question = Annotated[str | None, typer.Option(help="Question to append to the file's text, in the same user message.")]
Keep = Annotated[str | None, setting("specprefill_keep_pct", "Share of chunks to keep, in (0, 1].", "--keep-pct")]
Raw = Annotated[bool, typer.Option("--raw", help="Use the text itself as the prompt, without a chat template.")]
Level = Annotated[LogLevel, typer.Option("--log-level")]


EXAMPLES = (
    ("serve", "the default pair"),
    ("serve --target X --draft Y", "models of your own: folders, GGUF files or repository ids"),
    ("serve --host 0.0.0.0 --api-key K", "for other machines, too"),
)
GROUPS: dict[str, tuple[str, ...]] = {
    "Models": ("pair", "target", "draft", "config"),
    "Address and access": ("host", "port", "api_keys"),
    "Memory": ("memory_limit",),
    "Advanced: models": ("pairs_file", "no_draft", "max_models", "dtype", "kv_bits", "model_alias"),
    "Advanced: sparse prefill": (
        "specprefill",
        "specprefill_scope",
        "specprefill_threshold",
        "specprefill_keep_pct",
        "max_differ",
        "rule",
        "densify",
    ),
    "Advanced: answers": ("speculative", "prefill_step", "max_rows", "target_itl_ms"),
    "Advanced: memory and caches": (
        "prefix_cache_size",
        "prefix_cache_dir",
        "prefix_disk_size",
        "remember",
    ),
    "Advanced: access": ("admin_keys", "allowed_hosts", "allow_special_tokens"),
    "Advanced: several machines": ("hosts", "starting_port", "draft_placement"),
    "Advanced: logs": ("log_level",),
}


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
