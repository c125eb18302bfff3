"""The running server as an agent has to know it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass

from mlx_specprefill import SpecPrefillError

__all__ = ["NO_KEY", "RunningServer", "ServerError", "find"]

NO_KEY = "none"  # for clients that insist on a key
_TIMEOUT_S = 10.0
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


def find(url: str, key: str | None) -> RunningServer:
    """The server at this address, with or without a /v1 at its end.

    Raises:
        ServerError: says what is wrong.
    """
    base = url.rstrip("/").removesuffix("/v1")
    models = f"{base}/v1/models"
    try:
        request = urllib.request.Request(models, headers={"authorization": f"Bearer {key}"} if key else {})
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            model = json.load(response)["data"][0]
            return RunningServer(base, model["id"], int(model["context_length"]), key)
    except urllib.error.HTTPError as error:
        said = "asks for a key: --api-key" if error.code == 401 else f"answered with status {error.code}"
        raise ServerError(f"{models} {said}") from error
    except (KeyError, IndexError, TypeError) as error:
        raise ServerError(f"{models} does not answer as mlx-specprefill does") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ServerError(f"{models}: {reason}. Start the server first, or say where it is: --url") from error
