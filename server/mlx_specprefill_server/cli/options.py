"""Options that several commands share, the pair's among them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_specprefill import DtypeName

from ..settings.server import API_KEY_VARIABLE, LogLevel, description_of, variable

PairsFile = Annotated[Path | None, typer.Option(help="File of your own named pairs for --pair.")]
Url = Annotated[str, typer.Option("--url", help="Address of the running server.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=[API_KEY_VARIABLE, variable("api_keys")],
        callback=lambda given: given and given.partition(",")[0].strip(),
        help="API key, if the server requires one. Of several, the first is sent.",
    ),
]
Keep = Annotated[str | None, typer.Option("--keep-pct", help=description_of("specprefill_keep_pct"))]
Level = Annotated[LogLevel, typer.Option("--log-level")]


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
            help="Draft model: folder, GGUF file or repository id. self: the target's first layers, also of a pair. "
            "Default: self, if some of its layers are enough."
        ),
    ] = None
    dtype: Annotated[
        DtypeName,
        typer.Option(help="auto: as stored on a GPU, but float16 instead of bfloat16 on M1 and M2; float32 on a CPU."),
    ] = "auto"


def takes_pair(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the options of PairOptions in place of its keyword parameter `models`."""
    return with_options(command, "models", inspect.signature(PairOptions, eval_str=True).parameters, PairOptions)


def with_options(
    command: Callable[..., None], name: str, parameters: Mapping[str, Parameter], collect: Callable[..., Any]
) -> Callable[..., None]:
    """Return the command with further options in place of its keyword parameter `name`, which `collect` makes."""

    @wraps(command)
    def run(**given: Any) -> None:
        options = {option: given.pop(option) for option in parameters}
        command(**given, **{name: collect(**options)})

    signature = inspect.signature(command, eval_str=True)
    others = [parameter for parameter in signature.parameters.values() if parameter.name != name]
    keywords = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in (*others, *parameters.values())]
    run.__signature__ = signature.replace(parameters=keywords)  # type: ignore[attr-defined] # typer reads it
    return run
