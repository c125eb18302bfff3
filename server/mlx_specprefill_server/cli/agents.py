"""The command `connect`: it asks a running server, and prints what sets an agent up for it."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from ..agent_setup import AGENTS, RunningServer, Setup, any_other
from .common import OptionError, ask_server, one_line_errors
from .options import ApiKey, Url

_SMALL_WINDOW = 32_000  # tokens


def connect(
    agent: Annotated[str, typer.Argument(help=f"{', '.join(AGENTS)}, or any other.")],
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="Name of one of the server's models. Default: its first.")] = None,
) -> None:
    """Print the command that starts an agent on the running server, or the text to add to the agent's files.

    The address, the model's id and its window are the server's own. No file is changed.
    """
    with one_line_errors():
        server = _find(url.rstrip("/").removesuffix("/v1"), api_key, model)
        setup = AGENTS.get(agent, any_other)(server)
        typer.echo(text_of(setup), nl=False)
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


def text_of(setup: Setup) -> str:
    """Return the variables, in a command where they are all that the agent needs, and then the text for each file."""
    pairs = [f"{name}={shlex.quote(value)}" for name, value in setup.environment.items()]
    start = " \\\n".join([*pairs, setup.program]) + "\n" if setup.program else "".join(f"export {p}\n" for p in pairs)
    title = "or for every start, in" if setup.program else "add to"
    return "\n".join(filter(None, [start, *(f"# {title} {path}\n{text}" for path, text in setup.files.items())]))
