"""POST /v1/decisions: predicates, choices and scores about one input, answered by probabilities. Nothing is decoded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Depends, Request
from pydantic import Field, PlainValidator, SkipValidation, model_validator
from starlette.responses import Response

from mlx_specprefill import Decisions, GenerationRequest, InvalidRequestError, Progress, Question

from ..deltas import AnswerDelta, AnswerDone, Idle
from ..fields import Body, SpecPrefillFields
from ..generation.generation import AnswerSpec, Generation
from ..generation.reader import AnswerReader, IncrementalDetokenizer
from ..http.auth import IdentityDep
from ..http.errors import api_error, refusal
from ..http.event_stream import DONE, KEEP_ALIVE, comment, data_event
from ..http.while_connected import while_connected
from ..models.dependencies import ModelDep
from ..models.service import Service
from ..notations.formats import plain_text
from ..prompt.conversation import Conversation, conversation, text_of, unread_parts
from ..report import ProgressReporter, Report
from ..request_body import body_of, validate
from ..serving import respond
from .responses_protocol import input_of, read_items

router = APIRouter()

MAX_QUESTIONS, MAX_LABELS = 400, 255
YES, NO = "Yes", "No"


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
        if isinstance(self.instructions, list) and any(unread_parts([{"content": self.instructions}], "")):
            raise ValueError("this model reads text only, and the question has an image or a file without text")
        if not self.text.strip() or not all(self.labels):
            raise ValueError("instructions, choices and levels must not be empty")
        return self

    @property
    def text(self) -> str:
        return text_of(self.instructions, "instructions")

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
        most, found, shown = max(shares), dict[str, Any](), list[dict[str, Any]]()
        match self.type:
            case "predicate":
                return {"probability": shares[0]}
            case "choice":
                shown = [{"value": choice.value} for choice in self.choices or ()]
                found = {"choice": shown[shares.index(most)]["value"]}
            case "score":
                shown = [{"label": level.label, "value": place} for place, level in enumerate(self.levels or ())]
                found = {"score": sum(place * share for place, share in enumerate(shares))}
        parts = [part | {"probability": share} for part, share in zip(shown, shares, strict=True)]
        return {**found, "confidence": most, "probabilities": parts}


@dataclass
class Entry:
    """A question of a request: as it was understood, its tokens, or why it can't be answered."""

    name: str | None
    asked: Asked | None = None
    tokens: Question | None = None
    why: str = ""

    @classmethod
    def of(cls, question: Any) -> Entry:
        given = question if isinstance(question, dict) else {}
        entry = cls(name if isinstance(name := given.get("name"), str) else None)
        try:
            entry.asked = validate(Asked, given)
        except InvalidRequestError as error:
            entry.why = str(error).removeprefix(": ")
        return entry

    def warning(self, place: int) -> str:
        """Return the warning about a refused question."""
        return f"questions[{place}]{'' if self.name is None else f' ({self.name:.80})'}: {self.why}"


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
        read = read_items(None, self.input, {})
        unread = unread_parts([] if isinstance(self.input, str) else self.input, "input")
        left_out, off = (*unread, *read.left_out.values()), {"enable_thinking": False}
        return conversation(read.messages, (), off, field="input", left_out=left_out, opening_in_front=False)


@router.post("/v1/decisions")
async def create(
    request: Request,
    identity: IdentityDep,
    body: Annotated[DecisionsRequest, Depends(body_of(DecisionsRequest))],
    service: ModelDep,
) -> Response:
    """Answer questions about an input."""
    entries = [*map(Entry.of, body.questions)]
    texts = {i: entry.asked for i, entry in enumerate(entries) if entry.asked is not None}
    asked = [(question.render(), question.labels) for question in texts.values()]
    prompt, rows = await while_connected(request, service.prompts.behind(body.conversation(), asked))
    for i, row in zip(texts, rows, strict=True):
        if isinstance(row, str):
            entries[i].why = row
        else:
            entries[i].tokens = row
    refused = [entry.warning(i) for i, entry in enumerate(entries) if entry.tokens is None]
    if len(refused) == len(entries):
        raise refusal("questions", f"none can be answered: {refused[0]}")
    engine_request = GenerationRequest(
        prompt=prompt.tokens,
        max_tokens=0,
        specprefill=body.options(),
        spans=prompt.spans,
        questions=tuple(entry.tokens for entry in entries if entry.tokens is not None),
    )
    spec = AnswerSpec(engine_request, partial(_reader, service, engine_request))
    warnings = [*service.other_name(body.model), *prompt.left_out, *refused]
    generation = service.submit([spec], identity, body.cache_salt, warnings)
    answer = DecisionsAnswer(body.model or service.model_id, body, generation, entries)
    return await respond(request, generation, answer, streamed=body.stream)


def _reader(service: Service, request: GenerationRequest) -> AnswerReader:
    return AnswerReader(IncrementalDetokenizer(service.vocabulary.decode, request.prompt), plain_text())


class DecisionsAnswer:
    """The answers to one request's questions, whole or as a stream whose only event with data is their object."""

    def __init__(self, model: str, body: DecisionsRequest, generation: Generation, entries: Sequence[Entry]) -> None:
        self._model = model
        self._generation = generation
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
            if entry.asked is None or entry.tokens is None:
                yield {"type": "refusal", "name": entry.name}
            else:
                head = {"type": entry.asked.type, "name": entry.name}
                yield {**head, **entry.asked.answer(next(shares).tolist()), "specprefill": {"kept": next(kept)}}

    def _body(self) -> dict[str, Any]:
        report, error = self._report, self._report.error
        asked = sum(entry.tokens.tokens.size for entry in self._entries if entry.tokens)
        failed = {} if error is None else api_error(error).body()
        body = {"model": self._model, "answers": self._answers, "usage": report.items_usage(asked)}
        return {**body, **report.prefill_fields(), "timings": report.timings(), **failed}
