"""The part that OpenAI's endpoints share: request fields, the envelope of responses and chunks, logprobs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field, SkipValidation

from mlx_specprefill import Logprob, TokenEvent

from .. import __version__
from ..constrained.output_format import OUTPUT_FIELDS, OutputFormat, parse_response_format
from ..constrained.tool_choice import ToolChoice, read_choice
from ..fields import AnswerFields, Body, ChatFields, MaxTokens, OneOrMoreStops, Whole
from ..generation.reader import Vocabulary
from ..http.errors import refusal
from ..http.event_stream import comment, data_event
from ..report import Report

MAX_ANSWERS = 32
LOWEST_LOGPROB = -9999.0  # JSON has no -inf


class StreamOptions(Body):
    include_usage: bool = False


class GenerationFields(AnswerFields):
    """Fields of all OpenAI's requests."""

    stream_options: StreamOptions = StreamOptions()
    max_tokens: MaxTokens | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_ANSWERS)] = 1
    return_token_ids: bool = False
    response_format: Any = None
    structured_outputs: Any = None
    json_schema: Any = None
    grammar: Any = None
    stop: OneOrMoreStops = ()

    def answers(self) -> int:
        return self.n

    def stops(self) -> tuple[str, ...]:
        return self.stop

    def output(self) -> OutputFormat | None:
        given = {name: getattr(self, name) for name in OUTPUT_FIELDS if name in self.model_fields_set}
        return parse_response_format(given) if given else None


class ConversationFields(GenerationFields, ChatFields):
    """Fields of chat completions and responses."""

    tools: list[Any] = Field(default_factory=list)
    tool_choice: SkipValidation[str | dict[str, Any]] = "auto"  # `read_choice` refuses others
    parallel_tool_calls: bool = True

    def choice(self) -> ToolChoice:
        return "auto" if self.tool_choice == "auto" else read_choice(self.tool_choice)

    def parallel(self) -> bool:
        return self.parallel_tool_calls


def refuse_best_of(body: Mapping[str, Any]) -> None:
    """Refuse a choice among more answers than are shown, by an InvalidRequestError."""
    n = body.get("n", 1)
    if body.get("best_of", n) != n:
        raise refusal("best_of", "only the value of n is supported")


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that all chunks of one response share."""

    id: str
    object: str
    model: str
    created: int
    null_usage: bool = False  # OpenAI's streams carry "usage": null until the last chunk when usage is asked for

    @classmethod
    def new(cls, prefix: str, kind: str, model: str) -> Envelope:
        return cls(f"{prefix}-{uuid4().hex}", kind, model, int(time.time()))

    def body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return a whole response or one chunk."""
        head = {"id": self.id, "object": self.object, "created": self.created, "model": self.model}
        usage = {"usage": None} if self.null_usage else {}
        return {**head, "system_fingerprint": f"mlx-specprefill-{__version__}", "choices": choices, **usage, **more}

    def progress(self, progress: dict[str, Any], wanted: bool) -> bytes:
        """Return a chunk for clients that asked for it, else a comment: other clients may expect choices."""
        return data_event(self.body([], prompt_progress=progress)) if wanted else comment("progress", progress)

    def ending(self, choice: dict[str, Any], report: Report, is_last: bool) -> Iterator[bytes]:
        """Yield the finish chunk and, after the last one, usage if asked for. The last of them carries the report."""
        extras = report.extras() if is_last else {}
        if not (is_last and self.null_usage):
            yield data_event(self.body([choice], **extras))
            return
        yield data_event(self.body([choice]))
        yield data_event(self.body([], **{"usage": report.usage()}, **extras))


def logprob_entry(vocabulary: Vocabulary, event: TokenEvent) -> dict[str, Any]:
    """Return a token as an entry of OpenAI's logprobs."""
    own = Logprob(event.token, LOWEST_LOGPROB if event.logprob is None else event.logprob)
    return _entry(vocabulary, own) | {"top_logprobs": [_entry(vocabulary, other) for other in event.top_logprobs]}


def _entry(vocabulary: Vocabulary, token: Logprob) -> dict[str, Any]:
    return {
        "token": vocabulary.token_text(token.token),
        "logprob": max(token.logprob, LOWEST_LOGPROB),
        "bytes": vocabulary.token_bytes(token.token),
    }
