"""The running server as an agent has to know it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_specprefill import SpecPrefillError

__all__ = ["NO_KEY", "RunningServer", "ServerError", "find"]

NO_KEY = "none"  # for clients that insist on a key
_TIMEOUT_S = 30.0  # a machine that is busy with prompts answers late
_MOST_OUTPUT = 8192  # tokens; agents plan their compaction by it


class ServerError(SpecPrefillError):
    """The server can't be reached, or does not answer as this project's does."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Its address (without /v1), the id of its model, the model's window in tokens, and the key that it asks for."""

    base: str
    model: str
    window: int
    key: str | None = None

    @property
    def v1(self) -> str:
        return f"{self.base}/v1"

    @property
    def shown_key(self) -> str:
        """A key for clients that insist on one."""
        return self.key or NO_KEY

    @property
    def output(self) -> int:
        """Tokens of the window that an agent should leave for an answer. The server itself takes any number."""
        return min(_MOST_OUTPUT, self.window // 4)


def find(url: str, key: str | None, model: str | None = None) -> RunningServer:
    """The server at this address, with or without a /v1 at its end.

    Args:
        model: of several; None: the default one.

    Raises:
        ServerError: says what is wrong.
    """
    base = url.rstrip("/").removesuffix("/v1")
    models = f"{base}/v1/models"
    try:
        request = urllib.request.Request(models, headers={"authorization": f"Bearer {key}"} if key else {})
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            listed = json.load(response)["data"]
        return _running(base, listed, key, model)
    except urllib.error.HTTPError as error:
        said = "asks for a key: --api-key" if error.code == 401 else f"answered with status {error.code}"
        raise ServerError(f"{models} {said}") from error
    except (KeyError, IndexError, TypeError) as error:
        raise ServerError(f"{models} does not answer as mlx-specprefill does") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ServerError(f"{models}: {reason}. Start the server first, or say where it is: --url") from error


def _running(base: str, listed: Sequence[Mapping[str, Any]], key: str | None, wanted: str | None) -> RunningServer:
    """
    Raises:
        ServerError: it has no such model, or does not know how much that can read.
    """
    named = [one for one in listed if wanted in (None, one["id"], *(one.get("aliases") or ()))]
    if listed and not named:
        raise ServerError(f"{base} has no model {wanted!r}; it has: {', '.join(one['id'] for one in listed)}")
    model = named[0]
    if model["context_length"] is None:
        raise ServerError(f"{base} does not know the window of {model['id']}: its files are not on that machine")
    return RunningServer(base, model["id"], int(model["context_length"]), key)
