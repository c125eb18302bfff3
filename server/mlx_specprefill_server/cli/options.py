"""Options that several commands share, and the help of `serve`: groups of options with defaults and variables."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer
from pydantic import BeforeValidator
from typer.core import TyperCommand

from mlx_specprefill import DtypeName, RuleName

from ..settings import LogLevel, Settings, description_of, flag_of, variable

PairsFile = Annotated[Path | None, typer.Option(help="File of your own named pairs for --pair.")]

_MORE_FLAGS = {"specprefill_keep_pct": ("--keep-pct",)}

Question = Annotated[str | None, typer.Option(help="Question to append to the file's text, in the same user message.")]

Raw = Annotated[bool, typer.Option("--raw", help="Use the text itself as the prompt, without a chat template.")]
Url = Annotated[str, typer.Option(help="Address of the running server.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=["MLX_SPECPREFILL_API_KEY", variable("api_keys")],
        callback=lambda given: given and given.partition(",")[0].strip(),
        help="API key, if the server requires one. Of several, the first is sent.",
    ),
]
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
        "rule",
        "densify",
    ),
    "Advanced: answers": ("images", "speculative", "prefill_step", "max_rows", "target_itl_ms"),
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


def setting(name: str, *flags: str) -> Any:
    """Return an option that fills setting `name`."""
    return typer.Option(*flags, help=description_of(name))


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
    return _with_options(command, "models", inspect.signature(PairOptions, eval_str=True).parameters, PairOptions)


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with an option for each setting of GROUPS in place of its keyword parameter `given`."""
    names = [name for group in GROUPS.values() for name in group if name in Settings.model_fields]
    return _with_options(command, "given", {name: _parameter(name) for name in names}, dict)


def _with_options(
    command: Callable[..., None], name: str, parameters: Mapping[str, Parameter], collect: Callable[..., Any]
) -> Callable[..., None]:
    @wraps(command)
    def run(**given: Any) -> None:
        options = {option: given.pop(option) for option in parameters}
        command(**given, **{name: collect(**options)})

    signature = inspect.signature(command, eval_str=True)
    others = [parameter for parameter in signature.parameters.values() if parameter.name != name]
    keywords = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in (*others, *parameters.values())]
    run.__signature__ = signature.replace(parameters=keywords)  # type: ignore[attr-defined] # typer reads it
    return run


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
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, setting(name, *flags)]
    )


Rule = Annotated[RuleName | None, setting("rule")]
PrefillStep = Annotated[int | None, setting("prefill_step")]
KvBits = Annotated[int | None, setting("kv_bits")]
Keep = Annotated[str | None, setting("specprefill_keep_pct", "--keep-pct")]


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
