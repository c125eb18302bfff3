"""Clients that leave at a chosen event."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mlx_specprefill import Engine, Event, Failed, Finished, GenerationRequest, Progress, RequestHandle


def events_until(engine: Engine, request: GenerationRequest, leaves: Callable[[Event], bool]) -> list[Event]:
    """Return the events of a request that is cancelled at each event for which `leaves` is true."""
    handles, events = list[RequestHandle](), list[Event]()
    submitted, over = threading.Event(), threading.Event()

    def on_event(event: Event) -> None:
        submitted.wait(60)
        events.append(event)
        if leaves(event):
            handles[0].cancel()
        if isinstance(event, (Finished, Failed)):
            over.set()

    handles.append(engine.submit(request, on_event))
    submitted.set()
    assert over.wait(60)
    return events


def read_in(stage: str, events: list[Event]) -> list[int]:
    """Return the tokens that each step of a stage had read, without the beginning."""
    return [event.done for event in events if isinstance(event, Progress) and event.stage == stage and event.done]
