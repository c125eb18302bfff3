"""An OpenAI-compatible server as the model under test.

Full prefill alone needs nothing but /v1/chat/completions; other arms send this project's request fields. Arms that
choose chunks by other scores need the engine in the process. The server's cache serves no arm with another's prompt.
"""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .arms import FULL, SERVED_KINDS, Arm
from .errors import NotMeasuredError, UnreachableError
from .haystack import NOISE
from .model_under_test import Reply
from .tasks import Item

REMOTE_ARMS = ("full", "sparse", *SERVED_KINDS)
RULER_TEXT = NOISE * 40  # to learn how many characters a token has


class RemoteModel:
    """Args:
        url: with or without /v1 at its end.
        model: None: the first one that the server lists.
        timeout: seconds for one answer.

    Raises:
        UnreachableError: no server answers at that address.
        NotMeasuredError: the server is not OpenAI-compatible.
    """

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None, timeout: float = 600) -> None:
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._timeout = timeout
        self._model = model or self._first_model()
        self._characters = self._characters_per_token()

    @property
    def described(self) -> Mapping[str, str]:
        return {"server": self._base, "model": self._model}

    def count(self, text: str) -> int:
        """Return the number of tokens, estimated from one request's usage."""
        return math.ceil(len(text) / self._characters)

    def ask(self, item: Item, arms: Sequence[Arm], answer_tokens: int, seed: int) -> dict[Arm, Reply]:
        del seed  # of an arm that needs the engine
        if not item.values:
            raise NotMeasuredError("this task is judged by distributions; a server gives texts")
        if list(arms) == [FULL]:  # other servers may refuse fields that they don't know
            return {FULL: self._converse(item, {}, answer_tokens)}
        replies = {arm: self._converse(item, _options(arm), answer_tokens) for arm in arms}
        full = replies.get(FULL)
        if full is None:
            return replies
        return {
            arm: replace(reply, measures={**reply.measures, "same": float(reply.text == full.text)})
            for arm, reply in replies.items()
        }

    def _converse(self, item: Item, options: Mapping[str, Any], answer_tokens: int) -> Reply:
        """Run all turns with the server's own answers in between. The last one counts."""
        messages = item.messages_before
        for turn in item.turns:
            began = time.monotonic()
            messages.append({"role": "user", "content": turn.question})
            body = self._chat(messages, answer_tokens, options)
            text = _text(body)
            messages.append({"role": "assistant", "content": text})
        seconds = {"seconds": time.monotonic() - began}
        return Reply(text.rsplit("</think>", 1)[-1], _kept(body), seconds)

    def _chat(self, messages: Sequence[Mapping[str, str]], answer_tokens: int, options: Mapping[str, Any]) -> Any:
        asked = {"model": self._model, "messages": list(messages), "max_tokens": answer_tokens, "temperature": 0}
        return self._call("/chat/completions", asked | dict(options))

    def _first_model(self) -> str:
        try:
            return str(self._call("/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise NotMeasuredError(
                f"{self._base}/models lists no model: is this an OpenAI-compatible server?"
            ) from error

    def _characters_per_token(self) -> float:
        body = self._chat([{"role": "user", "content": RULER_TEXT}], 1, {})
        try:
            return len(RULER_TEXT) / int(body["usage"]["prompt_tokens"])
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            return 4.0  # a server that reports no usage

    def _call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            raise NotMeasuredError(f"the server answered {error.code}: {_reason(error)}") from error
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            raise UnreachableError(f"no answer from {self._base}: {getattr(error, 'reason', error)}") from error
        except ValueError as error:
            raise NotMeasuredError(f"what {self._base}{path} answered is not JSON: {error}") from error


def _options(arm: Arm) -> dict[str, Any]:
    if arm.kind not in REMOTE_ARMS:
        raise NotMeasuredError(
            f"arm {arm.kind} needs the engine in this process; a server has: {', '.join(REMOTE_ARMS)}"
        )
    fields: dict[str, Any] = {"cache_salt": arm.name}
    if arm.kind == "full":
        fields["specprefill"] = False
    elif arm.keep is not None:
        fields |= {"specprefill": True, "specprefill_keep_pct": float(arm.keep)}
    return fields


def _text(body: Any) -> str:
    try:
        return str(body["choices"][0]["message"]["content"] or "")
    except (KeyError, IndexError, TypeError) as error:
        raise NotMeasuredError(f"the answer has no choices[0].message.content: {str(body)[:200]}") from error


def _kept(body: Any) -> float | None:
    """Return the kept share from this project's report, None without one."""
    report = body.get("specprefill")
    if not isinstance(report, dict) or "kept_tokens" not in report:
        return None
    return float(report["kept_tokens"]) / float(report["prompt_tokens"])


def _reason(error: urllib.error.HTTPError) -> str:
    """Return the message of an OpenAI error body, else the start of the body."""
    text = error.read().decode("utf-8", errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:200]
