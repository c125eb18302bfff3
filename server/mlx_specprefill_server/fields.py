"""Request fields that all dialects share, with their ranges: sampling, stops, sparse prefill, thinking, refusals."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Set
from dataclasses import fields
from difflib import get_close_matches
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    model_validator,
)

from mlx_specprefill import (
    Penalty,
    Probability,
    RepetitionPenalty,
    RuleName,
    SamplingParams,
    Scope,
    SpecPrefillOptions,
    SpeculationName,
    Temperature,
)

from . import field_values
from .constrained.output_format import OutputFormat
from .constrained.tool_choice import ToolChoice
from .generation.reader import Vocabulary
from .http.errors import ApiError, refusal
from .prompt.conversation import Conversation

Share = Annotated[float, Field(gt=0, le=1)]
KeptShare = Annotated[Fraction, PlainValidator(field_values.keep, json_schema_input_type=Share)]

KINDS = {"enabled": True, "adaptive": True, "disabled": False}

UNLIMITED = -1  # tokens, as llama.cpp's clients write "no limit"
MAX_STOP_IDS = 1024
_NEAR = 0.85  # similarity of a mistyped name

Whole = Annotated[int, BeforeValidator(field_values.whole), Field(ge=-field_values.INT64, lt=field_values.INT64)]
TokenIds = Annotated[list[Whole], Field(fail_fast=True)]
Texts = Annotated[dict[str, str], PlainValidator(field_values.texts, json_schema_input_type=dict[str, str])]
Budget = Annotated[Whole, Field(ge=0)]
MaxTokens = Annotated[Whole, Field(ge=UNLIMITED)]
StopStrings = Annotated[tuple[str, ...], BeforeValidator(field_values.stops, json_schema_input_type=list[str])]
OneOrMoreStops = Annotated[StopStrings, BeforeValidator(field_values.listed, json_schema_input_type=str | list[str])]

NO_GUIDED = "not supported; use structured_outputs, its name in vLLM today, or response_format"
NO_FILTER = "not supported; use top_p, top_k or min_p"
Refused = Mapping[str, tuple[tuple[Any, ...], str]]  # field: (its neutral values, the reason to refuse others)
REFUSED: Refused = {
    "mirostat": ((0,), NO_FILTER),  # mirostat_tau and mirostat_eta mean nothing without it
    "top_n_sigma": ((0, -1), NO_FILTER),
    "top_a": ((0,), NO_FILTER),
    "tfs_z": ((1,), NO_FILTER),
    "tfs": ((1,), NO_FILTER),
    "dynatemp_range": ((0,), "not supported; use temperature"),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ((), NO_GUIDED)),
    "use_beam_search": ((False,), "not supported; use n for several answers"),
    "truncate_prompt_tokens": ((), "not supported: prompts are never cut; send what should be read"),
    "prompt_logprobs": ((), "not supported; /v1/completions gives the prompt's logprobs with echo and logprobs"),
}
# field: (its neutral values, the fields that mean nothing without it); the answer is made without them, with a warning
IGNORED: Mapping[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "dry_multiplier": ((0,), ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers")),
    "xtc_probability": ((0,), ("xtc_threshold",)),
    "typical_p": ((1,), ()),
    "bad_words": (([],), ()),
    "allowed_token_ids": ((), ()),
}


class Body(BaseModel):
    """A body with strict types (no "1" for 1). Unknown fields are ignored, and null means the default."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, protected_namespaces=())

    _drop_nulls = model_validator(mode="before")(field_values.no_nulls)


class SpecPrefillFields(Body):
    """Fields for prefill, caching and speculative decoding, the same on every endpoint that generates."""

    specprefill: bool | None = None
    specprefill_keep_pct: KeptShare | None = None
    specprefill_return_spans: bool = False
    specprefill_rule: RuleName | None = None
    specprefill_scope: Scope | None = None
    specprefill_estimate: bool | None = None
    speculative: SpeculationName | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None  # vLLM's

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, body: Any) -> Any:
        """Refuse a field of this server's that does not exist: a mistyped one would have no effect."""
        ours = [name for name in cls.model_fields if name.startswith("specprefill")]
        for name in body if isinstance(body, dict) else ():
            if isinstance(name, str) and name.startswith("specprefill") and name not in ours:
                message = f"{name} is no field of this server: it has {', '.join(ours)}"
                raise ApiError(400, message, param=name, code="unknown_parameter")
        return body

    def options(self) -> SpecPrefillOptions:
        """Return the engine's options."""
        return SpecPrefillOptions(
            self.specprefill,
            self.specprefill_keep_pct,
            self.specprefill_return_spans,
            self.specprefill_rule,
            speculative=self.speculative,
            scope=self.specprefill_scope,
            estimate=self.specprefill_estimate,
        )


class Reasoning(Body):
    """The reasoning object of OpenAI's responses and of OpenRouter's chat completions."""

    effort: str | None = None
    max_tokens: Budget | None = None
    enabled: bool | None = None


class Thinking(Body):
    """The thinking object of Anthropic and others."""

    type: str = ""
    budget_tokens: Budget | None = None


class ThinkingFields(Body):
    reasoning: Reasoning = Reasoning()
    thinking: Thinking = Thinking()
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def thinking_budget(self) -> int | None:
        """The limit in tokens; None means no limit of its own."""
        budget = self.reasoning.max_tokens
        return self.thinking.budget_tokens if budget is None else budget

    def template_kwargs(self, effort: str | None = None) -> dict[str, Any]:
        """Return the template's arguments for thinking, and over them those that the request gives.

        Effort "none" turns thinking off. Unknown kinds leave the choice to the template.
        """
        kwargs: dict[str, Any] = {}
        enabled = KINDS.get(self.thinking.type, self.reasoning.enabled)
        effort = effort or self.reasoning.effort
        if effort == "none":
            enabled = False
        elif effort is not None:
            kwargs["reasoning_effort"] = effort
        thinks = {} if enabled is None else {"enable_thinking": enabled}
        return {**thinks, **kwargs, **self.chat_template_kwargs}


class SamplingFields(Body):
    """Fields of sampling and of the tokens that end an answer."""

    _ignored: tuple[str, ...] = ()
    _mistyped: tuple[str, ...] = ()

    temperature: Temperature | None = None
    top_p: Probability = 1.0  # 0: the likeliest token alone
    top_k: Annotated[Whole, Field(ge=-1)] = 0  # 0 and -1: off
    min_p: Probability = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    repeat_penalty: RepetitionPenalty | None = None  # llama.cpp's and Ollama's name for it
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[
        dict[int, float], BeforeValidator(field_values.logit_bias, json_schema_input_type=dict[str, float])
    ] = Field(default_factory=dict)
    seed: Whole | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_IDS)] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[Whole, Field(ge=0)] = 0
    n_predict: MaxTokens | None = None  # llama.cpp's name for the limit

    @model_validator(mode="wrap")
    @classmethod
    def _note_ignored(cls, body: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        read = validate(body)
        if isinstance(body, dict):
            read._ignored = tuple(_ignored_in(body))
            read._mistyped = tuple(_mistyped_in(body, cls.model_fields.keys()))
        return read

    @property
    def ignored(self) -> list[str]:
        """Return the warnings about fields without effect."""
        unsupported = [f"{', '.join(self._ignored)}: not supported, and without effect here"] if self._ignored else []
        return [*unsupported, *self._mistyped]

    def given(self, defaults: Mapping[str, float]) -> dict[str, Any]:
        """Return the fields that the request gives, and the defaults of those that it leaves open."""
        return {**defaults, **{name: getattr(self, name) for name in self.model_fields_set}}

    def sampling(self, defaults: Mapping[str, float], vocabulary: Vocabulary) -> SamplingParams:
        """Return the engine's sampling parameters.

        Args:
            defaults: of the model, for fields that the request leaves open.

        Raises:
            InvalidRequestError: a token is not in the vocabulary.
        """
        for name in ("logit_bias", "stop_token_ids"):
            if any(not 0 <= token < vocabulary.size for token in getattr(self, name)):
                raise refusal(name, f"token ids must be from 0 to {vocabulary.size - 1}")
        given = self.given(defaults)
        values = {field.name: given.get(field.name, getattr(self, field.name)) for field in fields(SamplingParams)}
        values["repetition_penalty"] = given.get("repeat_penalty", values["repetition_penalty"])
        values["top_k"] = min(max(values["top_k"], 0), vocabulary.size)
        values["seed"] = None if self.seed is None or self.seed < 0 else self.seed
        return SamplingParams(**values)


class AnswerFields(SamplingFields, SpecPrefillFields):
    """Fields of every request for answers, and their meaning whatever the dialect calls them."""

    model: str | None = None
    stream: bool = False
    return_progress: bool = False
    loop_guard: Literal["on", "off"] | None = None

    @abstractmethod
    def limit(self) -> int | None:
        """Return the limit of an answer in tokens; None means the remaining context."""

    @abstractmethod
    def stops(self) -> tuple[str, ...]:
        """Return the strings that end the visible text. Neither they nor what follows is shown."""

    @abstractmethod
    def output(self) -> OutputFormat | None:
        """Return the text's required form, None for free text; raises InvalidRequestError."""

    def answers(self) -> int:
        """Return the number of answers to each prompt."""
        return 1

    def alternatives(self) -> int | None:
        """Return the number of alternatives beside each token (0..20); None means no logprobs at all."""
        return None

    def with_ids(self) -> bool:
        """Return whether the answer carries its token ids."""
        return False


class ChatFields(ThinkingFields, AnswerFields):
    """Fields of a request for answers to a conversation."""

    @abstractmethod
    def conversation(self) -> Conversation:
        """Return the normalised messages with the tools; raises InvalidRequestError."""

    @abstractmethod
    def choice(self) -> ToolChoice:
        """Return the tool choice; raises InvalidRequestError."""

    @abstractmethod
    def parallel(self) -> bool:
        """Return whether an answer may have several calls."""


def first_limit(*limits: int | None) -> int | None:
    """Return the first given of several fields for one limit, None without one."""
    first = next((limit for limit in limits if limit is not None), None)
    return None if first == UNLIMITED else first


def refuse_fields(body: Mapping[str, Any], refused: Refused) -> None:
    """Refuse unsupported fields with values that would change the answer, by an InvalidRequestError."""
    for name, (neutral, why) in refused.items():
        if _has_effect(body, name, neutral):
            raise refusal(name, why)


def _has_effect(body: Mapping[str, Any], name: str, neutral: tuple[Any, ...]) -> bool:
    given = body.get(name)
    return name in body and not any(type(given) in (type(value), float) and given == value for value in neutral)


def _ignored_in(body: Mapping[str, Any]) -> Iterator[str]:
    for name, (neutral, others) in IGNORED.items():
        if body.get(name) is not None and _has_effect(body, name, neutral):
            yield from (name, *(other for other in others if other in body))


def _mistyped_in(body: Mapping[str, Any], known: Set[str]) -> Iterator[str]:
    """Yield a sentence for each unknown field that is nearly called as one of this server's own."""
    own = known & (SpecPrefillFields.model_fields.keys() | {"loop_guard", "return_progress"})
    for name in body.keys() - known:
        if near := get_close_matches(name.lower(), own, 1, _NEAR):
            yield f"{name:.80}: no field of this server, and without effect; did you mean {near[0]}?"


def refuse_sampling(body: Mapping[str, Any]) -> None:
    """Refuse what no dialect supports, by an InvalidRequestError."""
    refuse_fields(body, REFUSED)
    names = ("repetition_penalty", "repeat_penalty")
    if all(name in body for name in names) and body[names[0]] != body[names[1]]:
        raise refusal(names[1], f"differs from {names[0]}, which means the same")


def refuse_documents(body: Mapping[str, Any]) -> None:
    """Refuse documents by an InvalidRequestError. Only chat completions take them."""
    if body.get("documents"):
        raise refusal("documents", "only /v1/chat/completions takes them")
