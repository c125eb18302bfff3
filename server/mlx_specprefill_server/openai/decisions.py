"""POST /v1/decisions: predicates, choices and scores about one input, answered by probabilities. Nothing is decoded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Self

from fastapi import APIRouter, Depends, Request
from pydantic import Field, PlainValidator, SkipValidation, model_validator
from starlette.responses import Response

from mlx_specprefill import Decisions, GenerationRequest, InvalidRequestError, Progress, Question

from ..auth import IdentityDep
from ..big_json import dumps
from ..deltas import AnswerDelta, AnswerDone, Idle
from ..errors import api_error, refusal
from ..event_stream import DONE, KEEP_ALIVE, comment, data_event
from ..fields import Body, SpecPrefillFields
from ..generation.generation import AnswerSpec, Generation
from ..generation.reader import AnswerReader, IncrementalDetokenizer
from ..models.dependencies import ModelDep
from ..parsers.formats import plain_text
from ..prompt.conversation import Conversation, conversation, image_paths, inline_system_messages, text_of
from ..report import ProgressReporter, Report
from ..request_body import body_of, validate
from ..service import Service
from ..serving import respond
from ..while_connected import while_connected
from .responses_protocol import input_of, read_items

router = APIRouter()

MAX_QUESTIONS, MAX_LABELS = 400, 255
YES, NO = "Yes", "No"


def _as_text(parts: Any) -> Any:
    """Return a content whose parts of JSON are text."""
    if not isinstance(parts, list):
        return parts
    return [
        {"type": "input_text", "text": dumps(part.get("data")).decode()}
        if isinstance(part, dict) and part.get("type") == "input_json"
        else part
        for part in parts
    ]


def _word(value: bool | str) -> str:
    return str(value).lower() if isinstance(value, bool) else value


class Choice(Body):
    value: bool | str
    description: str = ""


class Level(Body):
    label: str
    description: str = ""


class Asked(Body):
    """One question. `choices` belong to a choice, `levels` to a score."""

    type: Literal["predicate", "choice", "score"]
    instructions: str | list[Any]
    name: str | None = None
    choices: Annotated[list[Choice], Field(min_length=2, max_length=MAX_LABELS)] | None = None
    levels: Annotated[list[Level], Field(min_length=2, max_length=MAX_LABELS)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        wanted = {"choice": "choices", "score": "levels"}.get(self.type)
        if wanted is not None and getattr(self, wanted) is None:
            raise ValueError(f"a question of type {self.type} needs {wanted}")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError("each choice or level must be unique")
        if isinstance(self.instructions, list) and any(image_paths([{"content": self.instructions}], "")):
            raise ValueError("this model reads text only, and the question has an image")
        if not self.text.strip() or not all(self.labels):
            raise ValueError("instructions, choices and levels must not be empty")
        return self

    @property
    def text(self) -> str:
        return text_of(_as_text(self.instructions), "instructions")

    @property
    def labels(self) -> list[str]:
        """Return the texts of the answers. A text that reads like a boolean beside it has quotes."""
        if self.type == "score":
            return [level.label for level in self.levels or ()]
        if self.type == "predicate":
            return [YES, NO]
        values = [choice.value for choice in self.choices or ()]
        booleans = {_word(value) for value in values if isinstance(value, bool)}
        return [f'"{value}"' if value in booleans else _word(value) for value in values]

    def render(self) -> str:
        """Return the question as the user's turn."""
        if self.type == "predicate":
            return f"{self.text.strip()} {YES} or {NO}?"
        described = [part.description for part in (*(self.choices or ()), *(self.levels or ()))]
        lines = [
            f"- {label}: {more}" if more else f"- {label}" for label, more in zip(self.labels, described, strict=True)
        ]
        kind = (
            "one of these options" if self.type == "choice" else "one of these levels, from the lowest to the highest"
        )
        return "\n".join([self.text.strip(), f"Answer with {kind} alone:", *lines])

    def answer(self, shares: Sequence[float]) -> dict[str, Any]:
        """Return the answer by the labels' probabilities. A score is the mean of the levels' places, from 0 on."""
        head = {"type": self.type, "name": self.name}
        if self.type == "predicate":
            return {**head, "probability": shares[0]}
        confidence = max(shares)
        if self.type == "score":
            parts = [
                {"label": level.label, "value": i, "probability": share}
                for i, (level, share) in enumerate(zip(self.levels or (), shares, strict=True))
            ]
            score = sum(i * share for i, share in enumerate(shares))
            return {**head, "score": score, "confidence": confidence, "probabilities": parts}
        values = [choice.value for choice in self.choices or ()]
        parts = [{"value": value, "probability": share} for value, share in zip(values, shares, strict=True)]
        best = values[shares.index(confidence)]
        return {**head, "choice": best, "confidence": confidence, "probabilities": parts}


class DecisionsRequest(SpecPrefillFields):
    """The body of POST /v1/decisions. Each question is checked by itself."""

    model: str | None = None
    input: Annotated[str | list[Any], PlainValidator(input_of, json_schema_input_type=str | list[Any])]
    questions: Annotated[list[SkipValidation[Any]], Field(min_length=1, max_length=MAX_QUESTIONS)]
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    stream: bool = False
    return_progress: bool = False

    def conversation(self) -> Conversation:
        """Return the input as a conversation, in which the model does not think before an answer."""
        items = self.input if isinstance(self.input, str) else [*map(_item, self.input)]
        read = read_items(None, items, {})
        images = tuple(image_paths([] if isinstance(items, str) else items, "input"))
        messages, off = inline_system_messages(read.messages), {"enable_thinking": False}
        return conversation(messages, (), off, field="input", images=images, left_out=(*read.left_out.values(),))

    def asked(self) -> Iterator[Asked | Refused]:
        """Yield each question, or its refusal."""
        for i, question in enumerate(self.questions):
            name = question.get("name") if isinstance(question, dict) else None
            name = name if isinstance(name, str) else None
            try:
                yield validate(Asked, question if isinstance(question, dict) else {})
            except InvalidRequestError as error:
                yield Refused(name, i, str(error).removeprefix(": "))


class Refused(NamedTuple):
    """A question that can't be answered: its name and place, and why."""

    name: str | None
    place: int
    why: str

    @property
    def words(self) -> str:
        return f"questions[{self.place}]{'' if self.name is None else f' ({self.name:.80})'}: {self.why}"


Entry = tuple[Asked, Question] | Refused


def _item(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    return item | {name: _as_text(item[name]) for name in ("content", "output") if name in item}


@router.post("/v1/decisions")
async def create(
    request: Request,
    identity: IdentityDep,
    body: Annotated[DecisionsRequest, Depends(body_of(DecisionsRequest))],
    service: ModelDep,
) -> Response:
    """Answer questions about an input."""
    asked = list(body.asked())
    texts = [(question.render(), question.labels) for question in asked if isinstance(question, Asked)]
    prompt, rows = await while_connected(request, service.prompts.behind(body.conversation(), texts))
    entries = list(_settle(asked, iter(rows)))
    refused = [entry.words for entry in entries if isinstance(entry, Refused)]
    if len(refused) == len(entries):
        raise refusal("questions", f"none can be answered: {refused[0]}")
    engine_request = GenerationRequest(
        prompt=prompt.tokens,
        max_tokens=0,
        specprefill=body.options(),
        spans=prompt.spans,
        questions=tuple(entry[1] for entry in entries if not isinstance(entry, Refused)),
    )
    spec = AnswerSpec(engine_request, partial(_reader, service, engine_request))
    warnings = [*service.other_name(body.model), *prompt.left_out, *refused]
    generation = service.submit([spec], identity, body.cache_salt, warnings)
    return await respond(request, generation, DecisionsAnswer(service, body, generation, entries), streamed=body.stream)


def _settle(asked: Sequence[Asked | Refused], rows: Iterator[Question | str]) -> Iterator[Entry]:
    """Yield each question with its tokens, or its refusal."""
    for i, question in enumerate(asked):
        if isinstance(question, Refused):
            yield question
        else:
            row = next(rows)
            yield Refused(question.name, i, row) if isinstance(row, str) else (question, row)


def _reader(service: Service, request: GenerationRequest) -> AnswerReader:
    return AnswerReader(IncrementalDetokenizer(service.vocabulary.decode, request.prompt), plain_text())


class DecisionsAnswer:
    """The answers to one request's questions, whole or as a stream whose only event with data is their object."""

    def __init__(
        self, service: Service, body: DecisionsRequest, generation: Generation, entries: Sequence[Entry]
    ) -> None:
        self._generation = generation
        self._model = body.model or service.model_id
        self._progress = ProgressReporter(body.return_progress)
        self._entries = entries
        self._report = Report(generation)
        self._answers: list[dict[str, Any]] = []

    async def collect(self) -> dict[str, Any]:
        async for _, delta in self._generation.stream():
            self._take(delta)
        self._report.raise_error()
        return self._body()

    async def stream(self) -> AsyncIterator[bytes]:
        async for _, delta in self._generation.stream():
            self._take(delta)
            match delta:
                case Idle():
                    yield KEEP_ALIVE
                case Progress() if (event := self._progress.report(delta)) is not None:
                    shown = {"prompt_progress": event}
                    yield data_event(shown) if self._progress.wanted else comment("progress", event)
                case AnswerDone():
                    yield data_event(self._body())
        yield DONE

    def _take(self, delta: AnswerDelta) -> None:
        match delta:
            case Decisions():
                self._answers = list(self._answered(delta))
            case AnswerDone():
                self._report.add(delta)

    def _answered(self, found: Decisions) -> Iterator[dict[str, Any]]:
        shares = iter(found.probabilities)
        kept = iter([None] * len(found.probabilities) if found.kept is None else found.kept.tolist())
        for entry in self._entries:
            if isinstance(entry, Refused):
                yield {"type": "refusal", "name": entry.name}
            else:
                yield entry[0].answer(next(shares).tolist()) | {"specprefill": {"kept": next(kept)}}

    def _body(self) -> dict[str, Any]:
        report, error = self._report, self._report.error
        tokens = report.prompt_tokens + sum(
            entry[1].tokens.size for entry in self._entries if not isinstance(entry, Refused)
        )
        usage = {
            "input_tokens": tokens,
            "input_tokens_details": {"cached_tokens": report.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tokens,
        }
        failed = {} if error is None else api_error(error).body()
        body = {"model": self._model, "answers": self._answers, "usage": usage}
        return {**body, **report.prefill_fields(), "timings": report.timings(), **failed}
