"""The console command `mlx-specprefill`: serve, pull, generate, inspect, calibrate, eval, top."""

from __future__ import annotations

import typer

from .calibrating import calibrate
from .evaluating import evaluate
from .generating import generate
from .inspecting import inspect
from .pulling import pull
from .serving import serve
from .watching import top

__all__ = ["app", "main"]

app = typer.Typer(
    name="mlx-specprefill",
    help="Serve long prompts with SpecPrefill over MLX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (serve, pull, generate, inspect, calibrate, top):
    app.command()(command)
app.command("eval")(evaluate)


def main() -> None:
    """The console command."""
    app(prog_name="mlx-specprefill")
