"""`mlx-specprefill top`: a server's live numbers in a terminal, from its statistics endpoint."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mlx_specprefill import SpecPrefillError

from ..setting_errors import variable
from .common import one_line_errors
from .keyboard import pressed

__all__ = ["StatsError", "StatsReader", "top"]

_TIMEOUT_S = 10.0
_CONSUMERS = {
    "target_weights": "target weights",
    "draft_weights": "draft weights",
    "requests": "requests in work",
    "prefix_cache": "prefix cache",
    "sessions": "sparse sessions",
    "prefix_disk": "prefixes on disk",
    "unaccounted_bytes": "not accounted for",
    "active": "all arrays",
    "limit": "limit",
}


def top(
    url: Annotated[str, typer.Option(help="Of the server.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(envvar=variable("api_keys"), help="If the server asks for one. Of several the first is sent."),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the numbers once and end.")] = False,
) -> None:
    """Watch a running server: what it does, where its memory goes, what its last answers cost. q or Ctrl-C ends it."""
    with one_line_errors():
        reader = StatsReader(url, api_key and api_key.partition(",")[0].strip())
        if once:
            _show_once(reader, Console())
            return
        with suppress(KeyboardInterrupt):
            _watch(reader, Console(), interval)


class StatsError(SpecPrefillError):
    """The server can't be reached, or does not answer as this project's does."""


class StatsReader:
    """Asks one server for its numbers.

    Args:
        url: of the server, with or without a /v1 at its end.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1/specprefill/stats"
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    def read(self) -> dict[str, Any]:
        """One moment.

        Raises:
            StatsError: says what is wrong.
        """
        try:
            request = urllib.request.Request(self._url, headers=self._headers)
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                stats = json.load(response)
        except urllib.error.HTTPError as error:
            raise StatsError(_refusal(self._url, error.code)) from error
        except (OSError, ValueError) as error:
            raise StatsError(f"{self._url}: {getattr(error, 'reason', error)}") from error
        if not isinstance(stats, dict) or stats.get("object") != "specprefill.stats":
            raise StatsError(f"{self._url} does not answer as mlx-specprefill does")
        return stats


def _refusal(url: str, status: int) -> str:
    if status == 401:
        return f"{url} asks for a key: --api-key"
    if status == 503:
        return f"{url}: no model is in memory yet, or the server is not ready"
    return f"{url} answered with status {status}"


def _show_once(reader: StatsReader, console: Console) -> None:
    """Print the numbers; raises StatsError."""
    console.print(_panel(reader.read(), console.size.height))


def _watch(reader: StatsReader, console: Console, interval: float) -> None:
    """Show the numbers until interrupted or q is pressed. A server that goes away is waited for."""
    stats = reader.read()
    with (
        pressed() as next_key,
        Live(_panel(stats, console.size.height), console=console, screen=True, auto_refresh=False) as live,
    ):
        while next_key(interval) not in ("q", "Q"):
            try:
                stats, trouble = reader.read(), ""
            except StatsError as error:
                trouble = str(error)
            shown = _panel(stats, console.size.height)
            live.update(Group(Text(trouble, "bold red"), shown) if trouble else shown, refresh=True)


def _panel(stats: Mapping[str, Any], height: int) -> Group:
    recent = max(3, height - 18)
    return Group(_heading(stats), _now(stats), Text(), _memory(stats["memory"]), Text(), _recent(stats, recent))


def _heading(stats: Mapping[str, Any]) -> Text:
    state = "" if stats["alive"] else "  the engine has stopped"
    return Text.assemble((str(stats["model"]), "bold"), f"  draft {stats['draft'] or 'none'}", (state, "bold red"))


def _now(stats: Mapping[str, Any]) -> Text:
    lookups = stats["prefix_hits"] + stats["prefix_misses"]
    numbers = {
        "decoding": f"{stats['decoding']}",
        "prefilling": f"{stats['prefilling']}",
        "waiting": f"{stats['waiting']}",
        "tokens/s": f"{stats['tokens_per_second']:.1f}",
        "prefix hits": f"{stats['prefix_hits']}/{lookups}",
        "sessions": f"{stats['sessions']}",
    }
    return Text("   ").join(Text.assemble(f"{name} ", (value, "bold")) for name, value in numbers.items())


def _memory(memory: Mapping[str, int | None]) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("memory")
    table.add_column("", justify="right")
    for name, label in _CONSUMERS.items():
        value = memory[name]
        table.add_row(label, "unknown" if value is None else f"{value / 2**20:,.1f} MiB")
    return table


def _recent(stats: Mapping[str, Any], most: int) -> Table:
    table = Table(show_edge=False, pad_edge=False, title="recent answers", title_justify="left")
    for name in ("age s", "mode", "prompt", "read", "cached", "TTFT ms", "answer", "finish"):
        table.add_column(name, justify="left" if name in ("mode", "finish") else "right", no_wrap=True)
    table.add_column("why", no_wrap=True, overflow="ellipsis")
    for answer in stats["recent"][:most]:
        table.add_row(*_row(answer, stats["time"]))
    return table


def _row(answer: Mapping[str, Any], now: float) -> list[str | Text]:
    age, account = f"{now - answer['ended']:.0f}", answer["specprefill"]
    if account is None:
        return [age, *["-"] * 6, answer["finish"], ""]
    counts = [f"{account[name]:,}" for name in ("prompt_tokens", "kept_tokens", "cached_tokens")]
    times = account["timings"]
    first = f"{times['queue_ms'] + times['ttft_ms']:,.0f}"
    made = f"{answer['completion_tokens']:,}"
    return [age, account["mode"], *counts, first, made, answer["finish"], Text(account["reason"])]
