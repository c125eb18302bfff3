"""Request bodies of OpenAI's dialect. Unknown fields are ignored; unsupported ones that would change the answer are
refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any
from uuid import uuid4

from pydantic import BeforeValidator, Field

from mlx_specprefill import Logprob, TokenEvent

from .. import __version__
from ..constrained.output_format import OUTPUT_FIELDS, OutputFormat, parse_response_format
from ..constrained.tool_choice import ToolChoice, read_choice
from ..errors import refusal
from ..fields import AnswerFields, Body, ChatFields, MaxTokens, Whole, first_limit, refuse_documents, refuse_sampling
from ..generation.reader import Vocabulary
from ..prompt.conversation import Conversation, conversation, ending_of
from ..report import Report, comment, data_event

MAX_STOPS = 64
MAX_PROMPTS = 128
MAX_ANSWERS = 32


def _stops(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("must be a non-empty string or an array of them")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings are supported")
    return tuple(stops)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Return every form of `prompt` as a tuple of texts and id lists."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, an array of strings, an array of token ids, or an array of such arrays")
    if all(type(item) is int for item in value):
        return (tuple(value),)
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts are supported in one request")
    return tuple(_prompt(item) for item in value)


def _prompt(item: Any) -> str | tuple[int, ...]:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and all(type(token) is int for token in item):
        return tuple(item)
    raise ValueError("must be a string, an array of strings, an array of token ids, or an array of such arrays")


Prompts = str | list[str] | list[int] | list[list[int]]


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
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops, json_schema_input_type=str | list[str])] = ()

    def stops(self) -> tuple[str, ...]:
        return self.stop

    def output(self) -> OutputFormat | None:
        """Return the text's required form, None for free text.

        Raises:
            InvalidRequestError: not understood, or asked for twice.
        """
        given = {name: getattr(self, name) for name in OUTPUT_FIELDS if name in self.model_fields_set}
        return parse_response_format(given) if given else None


class ConversationFields(GenerationFields, ChatFields):
    """Fields of chat completions and responses."""

    tools: list[Any] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def choice(self) -> ToolChoice:
        """Return the tool choice; raises as `read_choice`."""
        return "auto" if self.tool_choice == "auto" else read_choice(self.tool_choice)

    def parallel(self) -> bool:
        return self.parallel_tool_calls


class ChatRequest(ConversationFields):
    """The body of POST /v1/chat/completions. `conversation` checks messages and tools."""

    messages: list[Any]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] = 0
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    documents: list[Any] = Field(default_factory=list)

    def conversation(self) -> Conversation:
        """Return the normalised messages with the tools."""
        ending = ending_of(self.add_generation_prompt, self.continue_final_message)
        given = conversation(self.messages, self.tools, self._template_kwargs(), ending)
        if not self.documents:
            return given
        return replace(given, template_kwargs={**given.template_kwargs, "documents": self.documents})

    def limit(self) -> int | None:
        """The limit in tokens; None means the remaining context."""
        return first_limit(self.max_completion_tokens, self.max_tokens, self.n_predict)

    def answers(self) -> int:
        return self.n

    def alternatives(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def with_ids(self) -> bool:
        return self.return_token_ids

    def _template_kwargs(self) -> dict[str, Any]:
        return self.thinking_kwargs(self.reasoning_effort) | self.chat_template_kwargs


class CompletionRequest(GenerationFields):
    """The body of POST /v1/completions."""

    prompt: Annotated[tuple[str | tuple[int, ...], ...], BeforeValidator(_prompts, json_schema_input_type=Prompts)]
    suffix: str = ""
    echo: bool = False
    logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None

    def limit(self) -> int | None:
        """The limit in tokens, as for chat."""
        return first_limit(self.max_tokens, self.n_predict)

    def answers(self) -> int:
        return self.n

    def alternatives(self) -> int | None:
        return self.logprobs

    def with_ids(self) -> bool:
        return self.return_token_ids


def _is(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: any(type(value) is type(allowed_value) and value == allowed_value for allowed_value in allowed)


# field: (a test for harmless values, the reason to refuse others)
REFUSED_IN_CHAT: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "functions": (_is([]), "not supported; use tools"),
    "function_call": (_is("auto", "none"), "not supported; use tools"),
    "modalities": (_is(["text"]), "only ['text'] is supported"),
    "audio": (_is({}), "not supported"),
    "web_search_options": (_is(), "not supported"),
    "echo": (_is(False), "not supported; with continue_final_message the answer goes on with the last message"),
}


def refuse_chat(body: Mapping[str, Any]) -> None:
    """Refuse fields that chat completions don't support, by an InvalidRequestError."""
    _refuse_best_of(body)
    refuse_sampling(body)
    for name, (harmless, why) in REFUSED_IN_CHAT.items():
        if name in body and not harmless(body[name]):
            raise refusal(name, why)
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):
        if body.get(name) == 0:
            raise refusal(name, "must be at least 1")
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise refusal("top_logprobs", "needs logprobs to be true")


def refuse_completion(body: Mapping[str, Any]) -> None:
    """Refuse fields that completions don't support, by an InvalidRequestError."""
    _refuse_best_of(body)
    refuse_sampling(body)
    refuse_documents(body)
    for name in ("max_tokens", "n_predict"):
        if body.get(name) == 0 and not body.get("echo"):
            raise refusal(name, "0 is only possible with echo")


def _refuse_best_of(body: Mapping[str, Any]) -> None:
    n = body.get("n", 1)
    if body.get("best_of", n) != n:
        raise refusal("best_of", "only the value of n is supported")


LOWEST_LOGPROB = -9999.0  # JSON has no -inf


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that all chunks of one response share."""

    id: str
    object: str
    model: str
    created: int
    null_usage: bool = False  # OpenAI's streams carry "usage": null until the last chunk when usage is asked for

    @classmethod
    def new(cls, prefix: str, kind: str, model: str, null_usage: bool = False) -> Envelope:
        return cls(f"{prefix}-{uuid4().hex}", kind, model, int(time.time()), null_usage)

    def body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return a whole response or one chunk."""
        head = {"id": self.id, "object": self.object, "created": self.created, "model": self.model}
        usage = {"usage": None} if self.null_usage else {}
        return {**head, "system_fingerprint": f"mlx-specprefill-{__version__}", "choices": choices, **usage, **more}

    def progress(self, progress: dict[str, Any], asked: bool) -> bytes:
        """Return a chunk for clients that asked, else a comment: other clients may expect choices."""
        return data_event(self.body([], prompt_progress=progress)) if asked else comment("progress", progress)

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
