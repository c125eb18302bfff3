from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_specprefill_server.event_stream import TextEvents, data_event


@given(st.text(), st.text())
def test_events_around_a_text_are_those_that_are_written_whole(text: str, model: str) -> None:
    def event(text: str) -> bytes:
        return data_event({"model": model, "delta": {"reasoning_content": text, "reasoning": text}})

    assert TextEvents(event).of(text) == event(text)
