"""`mlx-specprefill warm`: a running server reads an agent's system prompt and tools ahead of its first session."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer

from mlx_specprefill import SpecPrefillError

from ..settings import variable
from .common import one_line_errors, read_text

__all__ = ["WarmError", "warm"]

_TIMEOUT_S = 3600.0  # seconds; for the longest prompts on the slowest machines


class WarmError(SpecPrefillError):
    """The server can't be reached, or refuses the file."""


def warm(
    file: Annotated[Path, typer.Argument(help="The agent's request as JSON, in any dialect, or a system prompt.")],
    url: Annotated[str, typer.Option(help="Of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=variable("api_keys"), help="API key, if the server requires one. Of several, the first is sent."
        ),
    ] = None,
) -> None:
    """Let a running server read a system prompt and tools now, so that the agent's first session starts from them."""
    with one_line_errors():
        try:
            text = read_text(file)
        except OSError as error:
            raise WarmError(f"{file}: {error.strerror}") from error
        told = _post(url, body_of(text), api_key and api_key.partition(",")[0].strip())
        typer.echo(
            f"{told['tokens']} tokens of system prompt and tools are kept; {told['cached_tokens']} already were."
        )


def body_of(text: str) -> dict[str, Any]:
    """Return the file's request. Any text that is no request is a system prompt."""
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    return body if isinstance(body, dict) else {"messages": [{"role": "system", "content": text}]}


def _post(url: str, body: dict[str, Any], key: str | None) -> dict[str, Any]:
    url = url.rstrip("/").removesuffix("/v1") + "/v1/specprefill/warm"
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            told: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        raise WarmError(f"{url}: {_message(error)}") from error
    except (OSError, ValueError) as error:
        raise WarmError(f"{url}: {getattr(error, 'reason', error)}") from error
    if told.get("object") != "specprefill.warm":
        raise WarmError(f"{url} does not answer as mlx-specprefill does")
    return told


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {error.code}"
