"""Request bodies of Anthropic's dialect. Blocks and tools are checked where they are translated, in `blocks`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from mlx_specprefill import InvalidRequestError

from ..constrained.output_format import OutputFormat
from ..constrained.tool_choice import NamedTool, ToolChoice
from ..fields import (
    Body,
    Number,
    SamplingFields,
    SpecPrefillFields,
    ThinkingFields,
    Whole,
    refuse_documents,
    refuse_sampling,
)

__all__ = ["CountRequest", "MessagesRequest", "refuse"]

MAX_STOPS = 64


def _stops(stops: list[str]) -> list[str]:
    if not all(stops):
        raise ValueError("must not contain empty strings")
    return stops


class Choice(Body):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str = ""
    disable_parallel_tool_use: bool = False


class OutputConfig(Body):
    effort: str | None = None
    format: dict[str, Any] | None = None


class CountRequest(ThinkingFields):
    """The body of POST /v1/messages/count_tokens: the parts of a prompt."""

    model: str | None = None
    messages: list[Any]
    system: Any = None
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Choice = Choice()
    output_config: OutputConfig = OutputConfig()

    def choice(self) -> ToolChoice:
        """Return the tool choice in dialect-neutral form."""
        if self.tool_choice.type == "tool":
            return NamedTool(self.tool_choice.name)
        return "required" if self.tool_choice.type == "any" else self.tool_choice.type

    def template_kwargs(self) -> dict[str, Any]:
        """Return the template's arguments for thinking and effort."""
        return self.thinking_kwargs(self.output_config.effort)

    def output(self) -> OutputFormat | None:
        """Return the JSON schema that the answer must follow, None if there is none."""
        given, field = self.output_config.format, "output_config.format"
        if given is None:
            return None
        if given.get("type") != "json_schema":
            raise InvalidRequestError(f"{field}.type: must be 'json_schema'", field=f"{field}.type")
        if not isinstance(given.get("schema"), dict):
            raise InvalidRequestError(f"{field}.schema: must be an object", field=f"{field}.schema")
        return OutputFormat("json_schema", given["schema"], field=f"{field}.schema")


class MessagesRequest(CountRequest, SamplingFields, SpecPrefillFields):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[Whole, Field(ge=1)]
    stream: bool = False
    return_progress: bool = False
    temperature: Annotated[Number, Field(ge=0, le=1)] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True), AfterValidator(_stops)] = Field(
        default_factory=list
    )


def refuse(body: Mapping[str, Any]) -> None:
    """Refuse fields of this dialect that no local model can serve, by an InvalidRequestError."""
    for name in ("mcp_servers", "container"):
        if body.get(name):
            raise InvalidRequestError(f"{name}: not supported", field=name)
    refuse_sampling(body)
    refuse_documents(body)
