"""Finds the question of a prompt, whose attention says which tokens matter: mostly its last line or sentence.

Behind tool results it stands further up. Other lines that ask are found by `asked_lines`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..arrays import Indices
from ..config import ScoringConfig
from ..request import PromptSpan


def question_span(
    prompt_len: int, config: ScoringConfig, end: int | None = None, units: Indices | None = None
) -> tuple[int, int]:
    """Return [start, end) of the question's tokens, at least one.

    Args:
        end: of the last message; the prompt's if not given.
        units: starts of lines and sentences. The last one before `end` is the question, within the limits of
            `ScoringConfig.question_rows`. Without units the lower limit gives the number of tokens.
    """
    least, most = config.question_rows
    end = prompt_len if end is None else max(1, min(end, prompt_len))
    rows = least
    if units is not None and (before := units[units < end]).size:
        rows = min(max(end - int(before[-1]), least), most)
    return max(0, end - rows), end


def repeated_question_spans(
    spans: Sequence[PromptSpan], config: ScoringConfig, units: Indices
) -> tuple[tuple[int, int], ...]:
    """Return the ranges [start, end) of the question in a prompt that ends with tool results, in reading order.

    These are the model's last call with the text before it, and the last line or sentence of the last user message,
    each with header and end marker. Empty if the prompt ends with another kind of message: that one is the question.
    """
    users = [span for span in spans if span.kind == "user"]
    if not users or spans[-1].kind != "tool":
        return ()
    user = users[-1]
    called = next((span for span in reversed(spans) if span.kind == "assistant" and span.start > user.start), None)
    places = []
    if called is not None:
        said = max(called.content_start, called.content_end - config.question_rows[1])
        places += [(called.start, called.content_start), (said, called.end)]
    question = max(user.content_start, question_span(user.content_end, config, units=units)[0])
    places += [(user.start, user.content_start), (question, user.end)]
    return tuple((start, end) for start, end in places if start < end)
