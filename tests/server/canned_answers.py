"""Hand-made answers: deltas as a generation streams them, without an engine or a model behind them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from mlx_specprefill import PrefillReport, Timings
from mlx_specprefill_server.deltas import (
    AnswerDelta,
    AnswerDone,
    CallDelta,
    CallEnd,
    CallStart,
    ReasoningDelta,
    TextDelta,
)

REPORT = PrefillReport(
    mode="sparse",
    reason="asked for",
    prompt_tokens=100,
    kept_tokens=40,
    cached_tokens=30,
    kept_share=0.4,
    timings=Timings(draft_ms=1, select_ms=2, prefill_ms=3, ttft_ms=7, decode_ms=4),
)


class Given:
    """Stands in for a Generation."""

    prompts = (range(REPORT.prompt_tokens),)
    copies = 1
    warnings = ()
    deferred = (0, 0)

    def __init__(self, deltas: Sequence[AnswerDelta]) -> None:
        self._deltas = deltas

    async def stream(self) -> AsyncIterator[tuple[int, AnswerDelta]]:
        for delta in self._deltas:
            yield 0, delta


def call(number: int, name: str, *parts: str) -> list[AnswerDelta]:
    """A tool call whose arguments come in parts."""
    deltas = [CallDelta(part) for part in parts]
    return [CallStart(name, f"call_{number}"), *deltas, CallEnd("".join(parts))]


def done(reason: Any = "stop", **fields: Any) -> AnswerDone:
    return AnswerDone(reason, completion_tokens=9, reasoning_tokens=2, report=REPORT, **fields)


THOUGHT = [ReasoningDelta("Let me "), ReasoningDelta("see.")]
TEXT = [TextDelta("Good "), TextDelta("day")]
TWO_CALLS = [*call(0, "read", '{"path": "a', '.txt"}'), *call(1, "list", "{}")]
EVERYTHING: list[AnswerDelta] = [*THOUGHT, *TEXT, *TWO_CALLS, done("tool_calls")]


def streamed(stream: AsyncIterator[bytes]) -> list[dict[str, Any]]:
    """The events of a stream; each is named by its type."""

    async def read() -> bytes:
        return b"".join([chunk async for chunk in stream])

    return named_events(asyncio.run(read()).decode())


def named_events(text: str) -> list[dict[str, Any]]:
    out = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, _, data = block.partition("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        out.append(payload)
    return out
