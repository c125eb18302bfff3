"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mlx_specprefill import RuleName

from ..settings import LogLevel, default_text

__all__ = [
    "Draft",
    "Dtype",
    "DtypeName",
    "Keep",
    "KvBits",
    "Level",
    "NoDraft",
    "PairName",
    "PairsFile",
    "PrefillStep",
    "Question",
    "Raw",
    "Rule",
    "Target",
    "setting",
]


def setting(name: str, help: str, *flags: str, **more: Any) -> Any:
    """Return an option that fills setting `name`. Its help ends with the setting's default."""
    return typer.Option(*flags, help=f"{help} Default {default_text(name)}.", **more)


DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

PairName = Annotated[
    str | None,
    typer.Option("--pair", help="A pair named in models/pairs.toml. Default: smollm2 if it is installed, else demo."),
]
PairsFile = Annotated[Path | None, typer.Option(help="File of named pairs for --pair, in place of models/pairs.toml.")]
Target = Annotated[str | None, typer.Option(help="Target model: folder, GGUF file or repository id. Not with --pair.")]
Draft = Annotated[
    str | None,
    typer.Option(
        help="Draft model: folder, GGUF file or repository id. self: the target's first layers. "
        "Default: self, if the target can be prefilled in stages."
    ),
]
NoDraft = Annotated[
    bool,
    typer.Option("--no-draft", help="Score prompts with the target's own first layers, also in a pair with a draft."),
]
Dtype = Annotated[DtypeName, typer.Option(help="auto: as stored on a GPU, float32 on a CPU.")]
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
