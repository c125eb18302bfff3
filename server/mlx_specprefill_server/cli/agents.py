"""The command `connect`: it asks a running server, and prints or writes an agent's files."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from ..agent_setup import AGENTS, RunningServer, Setup, any_other
from ..config_files import ConfigurationError, edit, write
from .common import OptionError, ask_server, one_line_errors
from .options import ApiKey, Url

_STARTED_BY = {"continue": "cn"}  # other agents' commands have their names
_SMALL_WINDOW = 32_000  # tokens


def connect(
    agent: Annotated[str, typer.Argument(help=f"{', '.join(AGENTS)}, or any other.")],
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="Name of one of the server's models. Default: its first.")] = None,
    write_files: Annotated[
        bool, typer.Option("--write", help="Write the configuration into the agent's own files.")
    ] = False,
) -> None:
    """Print the configuration that connects an agent with the running server, or write it.

    The address, the model's id and its window are the server's own. The old content of a file is kept beside it in
    FILE.bak, and how to undo it is printed. A file that would lose something, as JSON with comments, is left
    unchanged: add the printed lines to it.
    """
    with one_line_errors():
        server = _find(url.rstrip("/").removesuffix("/v1"), api_key, model)
        setup = AGENTS.get(agent, any_other)(server)
        typer.echo(_write_files(setup, _STARTED_BY.get(agent, agent)) if write_files else _text(setup), nl=False)
        for note in setup.notes:
            typer.echo(f"note: {note}", err=True)
        if not server.tools:
            typer.echo("note: this model's chat template has no place for tools: agents can't call any", err=True)
        if server.window < _SMALL_WINDOW:
            typer.echo(f"note: the window has {server.window:,} tokens; agents begin with 3,000 to 20,000", err=True)


def _find(base: str, key: str | None, wanted: str | None) -> RunningServer:
    """Return the server at this address with its model of this name, or its first; raises OptionError."""
    models = ask_server(base, "/v1/models", key, "data")["data"]
    try:
        named = [model for model in models if wanted in (None, model["id"], *model.get("aliases", ()))]
        if not named:
            raise OptionError(f"{base} has no model {wanted!r}; it has: {', '.join(model['id'] for model in models)}")
        name, window = named[0]["id"], named[0]["context_length"]
        tools = (named[0].get("tools") or {}).get("definitions", True)
    except (KeyError, TypeError, AttributeError) as error:
        raise OptionError(f"{base}/v1/models does not answer as this project's server does: {error!r}") from error
    if window is None:
        raise OptionError(f"{base} does not know the window of {name}: its files are not on that machine")
    return RunningServer(base, name, window, key or "none", tools)  # some clients insist on a key


def _write_files(setup: Setup, command: str) -> str:
    """Write the agent's files and return what was done, how to undo it, and the command that comes next.

    Print the content of a file that can't be written.
    """
    try:
        if not setup.files:
            raise ConfigurationError("this agent has no file to write: use what is printed above")
        changed = write(setup.files, setup.defaults)
    except ConfigurationError:
        typer.echo(_text(setup), nl=False)
        raise
    if not changed:
        return f"Nothing to change.\n{_exports(setup)}Now run: {command}\n"
    lines = [f"{path} is written" + (f"; {copy} is what it was" if copy else "") for path, copy in changed]
    undo = [shlex.join(["mv", str(copy), str(path)] if copy else ["rm", str(path)]) for path, copy in changed]
    return "\n".join([*lines, f"To undo: {' && '.join(undo)}", f"{_exports(setup)}Now run: {command}", ""])


def _text(setup: Setup) -> str:
    """Return the text that a user has to add, by file."""
    parts = [f"# {path}\n{edit(b'', path, values, setup.defaults)}" for path, values in setup.files.items()]
    return "\n".join(filter(None, [*parts, _exports(setup)]))


def _exports(setup: Setup) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in setup.environment.items())
