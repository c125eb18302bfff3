"""The request body of /v1/responses. Items and tools are checked where they are translated, in `responses_input`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from mlx_specprefill import InvalidRequestError

from ..constrained.output_format import OutputFormat
from ..fields import Body, Texts, Whole, first_limit, refuse_documents, refuse_sampling
from .schemas import ConversationFields

__all__ = ["ResponsesRequest", "refuse"]

LOGPROBS = "message.output_text.logprobs"
STATELESS = "this server keeps no responses or conversations; send the whole conversation as input"


def _input(value: Any) -> str | list[Any]:
    if not isinstance(value, str | list) or not value:
        raise ValueError("must be a non-empty string or array of items")
    return value


class Text(Body):
    format: dict[str, Any] = Field(default_factory=lambda: {"type": "text"})


class ResponsesRequest(ConversationFields):
    """The body of POST /v1/responses and /v1/responses/input_tokens."""

    input: Annotated[str | list[Any], PlainValidator(_input, json_schema_input_type=str | list[Any])]
    instructions: str | None = None
    text: Text = Text()
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] = 0
    include: list[Any] = Field(default_factory=list)
    metadata: Texts = Field(default_factory=dict)
    prompt_cache_key: str | None = None
    user: str | None = None

    def logprobs_wanted(self) -> int | None:
        """The number of alternatives beside each token; None means no logprobs at all."""
        return self.top_logprobs if self.top_logprobs or LOGPROBS in self.include else None

    def limit(self) -> int | None:
        """The limit in tokens, by this dialect's name for it or another's; None means the remaining context."""
        return first_limit(self.max_output_tokens, self.max_tokens, self.n_predict)

    def template_kwargs(self) -> dict[str, Any]:
        """Return the template's arguments for thinking and effort."""
        return self.thinking_kwargs() | self.chat_template_kwargs

    def output(self) -> OutputFormat | None:
        """Return the text's required form: `text.format`, or a field of the same meaning from another endpoint."""
        own, other = self._format(), super().output()
        if own is not None and other is not None:
            raise InvalidRequestError(f"{other.field}: can't be combined with text.format", field=other.field)
        return own or other

    def _format(self) -> OutputFormat | None:
        given, field = self.text.format, "text.format"
        match given.get("type"):
            case "text":
                return None
            case "json_object":
                return OutputFormat("json_object", field=field)
            case "json_schema" if isinstance(given.get("schema"), dict):
                return OutputFormat("json_schema", given["schema"], given.get("strict") is True, f"{field}.schema")
            case "json_schema":
                raise InvalidRequestError(f"{field}.schema: must be an object", field=f"{field}.schema")
        rule = "must be 'text', 'json_object' or 'json_schema'"
        raise InvalidRequestError(f"{field}.type: {rule}", field=f"{field}.type")


def refuse(body: Mapping[str, Any]) -> None:
    """Refuse fields that need a memory between requests, or work after the answer, by an InvalidRequestError."""
    for name in ("previous_response_id", "conversation"):
        if body.get(name):
            raise InvalidRequestError(f"{name}: {STATELESS}", field=name)
    refuse_sampling(body)
    refuse_documents(body)
    if body.get("echo"):
        raise InvalidRequestError("echo: not supported", field="echo")
    for name in ("max_tokens", "n_predict"):
        if body.get(name) == 0:
            raise InvalidRequestError(f"{name}: must be at least 1", field=name)
    if body.get("n", 1) != 1:
        raise InvalidRequestError("n: a response is one answer", field="n")
    for name in ("background", "prompt"):
        if body.get(name):
            raise InvalidRequestError(f"{name}: not supported", field=name)
