"""The options of `mlx-specprefill serve`. Its work (`run_server`) is imported once they are read."""

from __future__ import annotations

from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from ..options import PairOptions, takes_pair
from .options import SettingsCommand, takes_settings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(cls=SettingsCommand)
@takes_pair
@takes_settings
def serve(
    config: Annotated[
        Path | None,
        typer.Option(
            help="Table of several models, each loaded on its first request. Default: models.toml in "
            "~/.config/mlx-specprefill, if it exists and no model is named."
        ),
    ] = None,
    *,
    models: PairOptions,
    given: dict[str, Any],
) -> None:
    """Start the OpenAI-compatible server. Every setting also has an environment variable: MLX_SPECPREFILL_PORT, ..."""
    of_one_model = {**asdict(models), "model_alias": given["model_alias"]}
    named = [name for name, value in of_one_model.items() if value and name != "dtype"]
    import_module(".refusals", __package__).start(models, named, given, config)
