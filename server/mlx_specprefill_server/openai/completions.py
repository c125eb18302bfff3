"""POST /v1/completions: raw prompts, echo and logprobs as evaluation tools use them, filling in the middle."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BeforeValidator, Field
from starlette.responses import Response

from mlx_specprefill import (
    Constraint,
    Logprob,
    Progress,
    PromptLogprobs,
    TokenEvent,
    TokenIds,
)

from ..constrained.answer_grammar import constraint_of
from ..deltas import AnswerDelta, AnswerDone, Idle, TextDelta
from ..fields import Whole, first_limit, refuse_documents, refuse_sampling
from ..generation.generation import Generation
from ..generation.reader import IncrementalDetokenizer, Vocabulary
from ..http.auth import IdentityDep
from ..http.errors import refusal
from ..http.event_stream import DONE, KEEP_ALIVE, data_event
from ..http.while_connected import while_connected
from ..models.dependencies import ModelDep
from ..models.service import Service
from ..notations.formats import plain_text
from ..prompt.builder import Prompt
from ..report import ProgressReporter, Report
from ..request_body import body_of
from ..serving import make_spec, prompt_of_ids, respond
from .protocol import LOWEST_LOGPROB, Envelope, GenerationFields, refuse_best_of

router = APIRouter()

MAX_PROMPTS = 128
# (markers, their places): Qwen and others, StarCoder, DeepSeek, GLM; Codestral puts the end first
_ORDER = "{0}{prompt}{1}{suffix}{2}"
FILL_IN_THE_MIDDLE = (
    (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), _ORDER),
    (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), _ORDER),
    (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), _ORDER),
    (("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"), _ORDER),
    (("[SUFFIX]", "[PREFIX]"), "{0}{suffix}{1}{prompt}"),
)

Logprobs = dict[str, list[Any]]
Scores = tuple[tuple[Logprob, tuple[Logprob, ...]], ...]
Addition = tuple["_Choice", str, Logprobs | None, tuple[int, ...]]  # new text, its logprobs, its token ids

Prompts = str | list[str] | list[int] | list[list[int]]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _read_prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Return every form of `prompt` as a tuple of texts and id lists."""
    prompts = [value] if isinstance(value, str) or (value and _is_ids(value)) else value
    if not isinstance(prompts, list) or not prompts or not all(isinstance(p, str) or _is_ids(p) for p in prompts):
        raise ValueError("must be a string, an array of strings, an array of token ids, or an array of such arrays")
    if len(prompts) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts are supported in one request")
    return tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts)


class CompletionRequest(GenerationFields):
    """The body of POST /v1/completions."""

    prompt: Annotated[tuple[str | tuple[int, ...], ...], BeforeValidator(_read_prompts, json_schema_input_type=Prompts)]
    suffix: str = ""
    echo: bool = False
    logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None

    def limit(self) -> int | None:
        return first_limit(self.max_tokens, self.n_predict)

    def alternatives(self) -> int | None:
        return self.logprobs

    def with_ids(self) -> bool:
        return self.return_token_ids


def refuse_completion(body: Mapping[str, Any]) -> None:
    """Refuse fields that completions don't support, by an InvalidRequestError."""
    refuse_best_of(body)
    refuse_sampling(body)
    refuse_documents(body)


@router.post("/v1/completions")
async def create(
    request: Request,
    identity: IdentityDep,
    body: Annotated[CompletionRequest, Depends(body_of(CompletionRequest, refuse_completion))],
    service: ModelDep,
) -> Response:
    """Continue one or several prompts."""
    if len(body.prompt) * body.n > MAX_PROMPTS:
        raise refusal("n", f"at most {MAX_PROMPTS} answers are supported in one request")
    warnings = [*service.other_name(body.model), *body.ignored]
    constraint: Constraint | None = None
    if (output := body.output()) is not None:
        make = partial(constraint_of, output, special=service.vocabulary.special, warnings=warnings)
        constraint = await service.constrain(make)
    sampling = body.sampling(service.sampling, service.vocabulary)
    prompts = await while_connected(request, _prompts(service, body))
    scored = body.logprobs if body.echo else None
    specs = [
        make_spec(
            service,
            body,
            sampling,
            prompt,
            plain_text,
            field="prompt",
            prompt_logprobs=scored,
            constraint=constraint,
            every_token=True,
            guarded=constraint is None and body.loop_guard == "on",
        )
        for prompt in prompts
    ]
    generation = service.submit(specs, identity, body.cache_salt, warnings, body.n)
    return await respond(request, generation, CompletionAnswer(service, body, generation), streamed=body.stream)


async def _prompts(service: Service, body: CompletionRequest) -> list[Prompt]:
    return [await _prompt(service, prompt, body.suffix) for prompt in body.prompt]


async def _prompt(service: Service, prompt: str | tuple[int, ...], suffix: str) -> Prompt:
    if isinstance(prompt, str):
        return await service.prompts.raw(fill_in_the_middle(service.vocabulary, prompt, suffix) if suffix else prompt)
    if suffix:
        raise refusal("suffix", "needs a prompt of text")
    return prompt_of_ids(service, prompt)


def fill_in_the_middle(vocabulary: Vocabulary, prompt: str, suffix: str) -> str:
    """Return a prompt for the text between both, with the model's own markers. Refuse a model without them."""
    for markers, template in FILL_IN_THE_MIDDLE:
        if all(marker in vocabulary.special for marker in markers):
            return template.format(*markers, prompt=prompt, suffix=suffix)
    raise refusal("suffix", "this model has no tokens for filling in the middle")


@dataclass(slots=True)
class _Choice:
    """One answer: the prompt still to be echoed (None: none, or done), and the text so far."""

    index: int
    echo: str | None
    prompt: TokenIds
    text: str = ""
    length: int = 0  # characters that have been sent
    logprobs: Logprobs = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class CompletionAnswer:
    """The answers of one request, as a whole or as a stream."""

    def __init__(self, service: Service, body: CompletionRequest, generation: Generation) -> None:
        self._generation = generation
        self._vocabulary = service.vocabulary
        self._progress = ProgressReporter(body.return_progress)
        self._body = body
        texts = [text if isinstance(text, str) else self._vocabulary.decode(text) for text in body.prompt]
        self._choices = [
            _Choice(i, texts[i // body.n] if body.echo else None, prompt) for i, prompt in enumerate(generation.prompts)
        ]
        self._report = Report(generation)
        self._envelope = Envelope.new("cmpl", "text_completion", body.model or service.model_id)

    async def collect(self) -> dict[str, Any]:
        async for index, delta in self._generation.stream():
            for choice, text, logprobs, tokens in self._additions(index, delta):
                choice.text += text
                choice.token_ids += tokens
                for name, values in (logprobs or {}).items():
                    choice.logprobs.setdefault(name, []).extend(values)
            if isinstance(delta, AnswerDone):
                self._choices[index].finish_reason = delta.finish_reason
                self._report.add(delta, index)
        self._report.raise_error()
        choices = [
            self._choice(c, c.text, c.logprobs or self._logprobs((), ()), c.token_ids, c.prompt, c.finish_reason)
            for c in self._choices
        ]
        return self._envelope.body(choices, usage=self._report.usage(), **self._report.extras())

    async def stream(self) -> AsyncIterator[bytes]:
        self._envelope = replace(self._envelope, null_usage=self._body.stream_options.include_usage)
        for choice in self._choices:
            yield data_event(self._envelope.body([self._choice(choice, "", None, prompt=choice.prompt)]))
        async for index, delta in self._generation.stream():
            for addition in self._additions(index, delta):
                yield data_event(self._envelope.body([self._choice(*addition)]))
            match delta:
                case Idle():
                    yield KEEP_ALIVE
                case Progress() if (event := self._progress.report(delta)) is not None:
                    yield self._envelope.progress(event, self._progress.wanted)
                case AnswerDone():
                    finish = self._choice(self._choices[index], "", None, finish_reason=delta.finish_reason)
                    for last in self._envelope.ending(finish, self._report, self._report.add(delta, index)):
                        yield last
        yield DONE

    def _additions(self, index: int, delta: AnswerDelta) -> list[Addition]:
        """Return the text that a delta adds to an answer: first the echoed prompt, then new text."""
        if isinstance(delta, Idle | Progress):
            return []
        choice = self._choices[index]
        out: list[Addition] = []
        if choice.echo is not None:
            scores = delta.entries if isinstance(delta, PromptLogprobs) else ()
            out.append((choice, choice.echo, self._prompt_logprobs(choice, choice.echo, scores), ()))
            choice.length, choice.echo = len(choice.echo), None
        if isinstance(delta, TextDelta):
            ids = tuple(event.token for event in delta.tokens)
            offsets = [choice.length + place for place in delta.places]
            out.append((choice, delta.text, self._logprobs(delta.tokens, offsets), ids))
            choice.length += len(delta.text)
        return out

    def _choice(
        self,
        choice: _Choice,
        text: str,
        logprobs: Logprobs | None,
        token_ids: Sequence[int] = (),
        prompt: TokenIds | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        """Return OpenAI's choice, with vLLM's `token_ids` and, once, `prompt_token_ids` on request."""
        head = {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        if not self._body.return_token_ids:
            return head
        ids = {"token_ids": list(token_ids)}
        return head | ids | ({} if prompt is None else {"prompt_token_ids": prompt.tolist()})

    def _prompt_logprobs(self, choice: _Choice, echo: str, scores: Scores) -> Logprobs | None:
        """Return the prompt's logprobs. The first token has none: nothing precedes it."""
        first = TokenEvent(int(choice.prompt[0]))
        tokens = [first, *(TokenEvent(own.token, own.logprob, top) for own, top in scores)]
        return self._logprobs(tokens, self._offsets(echo, tokens))

    def _offsets(self, echo: str, tokens: Sequence[TokenEvent]) -> Iterator[int]:
        """Yield where each of the prompt's tokens begins. Those that the tokenizer has added have no characters."""
        decoded, place = IncrementalDetokenizer(self._vocabulary.decode), 0
        for event in tokens:
            yield place
            text = decoded.push(event.token)
            place += next((len(part) for part in (text, text.lstrip()) if echo.startswith(part, place)), 0)

    def _logprobs(self, tokens: Sequence[TokenEvent], offsets: Iterable[int]) -> Logprobs | None:
        if self._body.logprobs is None:
            return None
        return {
            "tokens": [self._vocabulary.token_text(event.token) for event in tokens],
            "token_logprobs": [None if e.logprob is None else max(e.logprob, LOWEST_LOGPROB) for e in tokens],
            "top_logprobs": [_top(self._vocabulary, event) for event in tokens],
            "text_offset": list(offsets),
        }


def _top(vocabulary: Vocabulary, event: TokenEvent) -> dict[str, float] | None:
    """Return the alternatives and the token itself, as OpenAI counts them. Of two with one text the likelier one
    counts.
    """
    if event.logprob is None:
        return None
    scored = sorted(
        (*event.top_logprobs, Logprob(event.token, event.logprob)), key=lambda alternative: alternative.logprob
    )
    return {
        vocabulary.token_text(alternative.token): max(alternative.logprob, LOWEST_LOGPROB) for alternative in scored
    }
