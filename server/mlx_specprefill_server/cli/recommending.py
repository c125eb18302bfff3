"""`mlx-specprefill recommend`."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..getting.needs import size
from ..getting.recommending import Recommended
from ..getting.recommending import recommended as find
from .common import OptionError, one_line_errors, usable_memory
from .stored import AsJson, KeepPct

__all__ = ["recommend"]


def recommend(
    memory_limit: Annotated[
        str | None,
        typer.Option(help="For weights and caches, as 48GB. Default: what this machine recommends."),
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of prompt and answer for which there is room.")] = 32768,
    keep_pct: KeepPct = 0.2,
    as_json: AsJson = False,
) -> None:
    """Show the pairs that fit the memory of this machine, the largest target first.

    Sizes are computed from parameter counts and bits; gains are counted operations. None of these pairs was run by this
    project. A prefill's working memory and the prefix cache come on top.
    """
    with one_line_errors():
        limit = _limit(memory_limit)
        pairs = find(limit, context, Fraction(str(keep_pct)))
    if as_json:
        said = [pair.facts(context) for pair in pairs]
        typer.echo(json.dumps({"memory_limit": limit, "context": context, "keep": keep_pct, "pairs": said}))
        return
    if not pairs:
        typer.echo(f"No pair of the table fits {size(limit)} at {context:,} tokens; smollm2 fits every machine.")
        return
    _print(pairs, limit, context)


def _limit(given: str | None) -> int:
    """
    Raises:
        OptionError: none is given, and the machine doesn't say one.
    """
    found = usable_memory(given)
    if found is None:
        raise OptionError("this machine doesn't say how much memory may be used: set --memory-limit")
    return found


def _print(pairs: list[Recommended], limit: int, context: int) -> None:
    table = Table(show_edge=False, title_justify="left")
    table.title = f"Pairs that fit {size(limit)} with {context:,} tokens"
    for column in ("target", "draft"):
        table.add_column(column, overflow="fold")
    for column in ("weights", "KV cache", "predicted gain", "here"):
        table.add_column(column, justify="right")
    for pair in pairs:
        said = pair.facts(context)
        gain = "-" if pair.gain is None else f"{pair.gain:.2f}"
        cells = (size(said["weights"]), size(said["kv_cache"]), gain, "yes" if said["here"] else "no")
        table.add_row(said["target"], said["draft"] or "self", *cells)
    Console().print(table, markup=False, highlight=False)
    for pair in pairs:
        if pair.measured is not None:
            typer.echo(f"\nMeasured by others, {pair.target.name}: {pair.measured}")
