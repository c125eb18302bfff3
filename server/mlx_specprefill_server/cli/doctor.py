"""The options of `mlx-specprefill doctor`. Its work (`examination`) is imported once they are read."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from .common import FAILED, OptionError, one_line_errors


def doctor(
    compute: Annotated[
        bool,
        typer.Option("--compute", help="Compare results of tiny models on this device with known ones."),
    ] = False,
    file: Annotated[Path | None, typer.Option("--json", help="With --compute: write the record to this file.")] = None,
) -> None:
    """Print the machine, the installation, the models and the settings, and each problem with its remedy.

    Ends with status 1 where something is wrong. Loads no model and needs no network.
    """
    with one_line_errors():
        if file is not None and not compute:
            raise OptionError("--json belongs to --compute")
        work = import_module(".examination", __package__)
        wrong = work.print_findings()
        if compute:
            wrong = not work.compute_checks(file) or wrong
    if wrong:
        raise typer.Exit(FAILED)
