"""From a body of any dialect to the engine's requests, and to the response; the service of one loaded model.

All models of a server share its `ServerState`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from fastapi import Request
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive

from mlx_specprefill import (
    Constraint,
    ContextLengthError,
    Engine,
    EngineClosedError,
    Event,
    GenerationRequest,
    Inspection,
    ReasoningBudget,
    RequestHandle,
    SamplingParams,
    Verdict,
)

from .constrained.output_format import constraint_of
from .constrained.tool_choice import ToolChoice, resolve_tool_choice
from .errors import DeadlineError, JsonResponse, refusal
from .fields import AnswerFields, ChatFields, SamplingFields
from .generation.generation import AnswerResult, AnswerSpec, Generation, ThreadsafeCalls
from .generation.reader import AnswerReader, IncrementalDetokenizer, Mark, StopMatcher, Vocabulary
from .middleware import Identity, current_trace
from .monitoring.answers import AnswerVerdict, NewestAnswers, RunningRequest, Verdicts, recent_answer
from .monitoring.metrics import Metrics
from .pairs import short_name
from .parsers.base import Parser
from .parsers.formats import detect
from .prompt.conversation import Conversation
from .prompt.prompt import Prompt, PromptBuilder
from .prompt.stable import ToolOrders
from .report import EventStream
from .settings import Settings

CONVERTERS = 2  # threads; they compete with the event loop for the interpreter
PATIENCE_S = 5.0  # seconds for the engine to end an answer itself, between two of its steps

T = TypeVar("T")
logger = logging.getLogger(__name__)


class ServerState:
    """The state that all models of one server share. Used on the event loop.

    Attributes:
        requests: POST requests that have no response yet.
        draining: running requests may finish, new ones are refused.
        inspections: the running ones.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.started = int(time.time())
        self.recent: NewestAnswers[dict[str, Any]] = NewestAnswers()
        self.verdicts = Verdicts()
        self.requests = 0
        self.draining = False
        self.stopping = False
        self.inspections: set[RequestHandle] = set()
        self._generations: WeakKeyDictionary[Generation, RunningRequest] = WeakKeyDictionary()
        self._loop_calls: WeakKeyDictionary[asyncio.AbstractEventLoop, ThreadsafeCalls] = WeakKeyDictionary()
        self._converters = ThreadPoolExecutor(CONVERTERS, thread_name_prefix="bodies")

    async def convert(self, call: Callable[[], T], large: bool) -> T:
        """Return the result of `call`. A large body is converted in a thread beside the event loop."""
        if not large:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._converters, call)

    def calls(self) -> ThreadsafeCalls:
        """The calls to the running loop."""
        loop = asyncio.get_running_loop()
        return self._loop_calls.setdefault(loop, ThreadsafeCalls(loop))

    def add(self, generation: Generation, line: RunningRequest) -> None:
        """Add answers that end when the server stops. Their line is listed while they run."""
        self._generations[generation] = line
        if (deadline := current_deadline()) is not None:
            generation.end_at(*deadline)

    def forget(self, identity: str | None) -> None:
        """Drop the last answers of one API key, or of all, and the verdicts on them."""
        self.recent.forget(identity)
        self.verdicts.forget(identity)

    def running(self, identity: str | None) -> list[RunningRequest]:
        """Return the running requests, oldest first, of one API key or of all, as `NewestAnswers.newest_first`."""
        lines = [line for generation, line in self._generations.items() if generation.running]
        return sorted((line for line in lines if identity in (None, line.identity)), key=lambda line: line.begun)

    def refuse_when_stopping(self) -> None:
        """Refuse requests while the server stops, by an EngineClosedError."""
        if self.stopping:
            raise EngineClosedError("the server is shutting down")

    def stop(self) -> None:
        """End all running answers so that each stream closes properly, and refuse new ones."""
        self.draining = self.stopping = True
        for generation in list(self._generations):
            generation.stop(PATIENCE_S)
        for handle in self.inspections:
            handle.cancel()


class Service:
    """One loaded model: its engine, tokenizer and settings.

    Args:
        state: of the server; None: one of its own.
        metrics: that go on; None: new ones.
    """

    def __init__(
        self, engine: Engine, settings: Settings, state: ServerState | None = None, metrics: Metrics | None = None
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.state = state or ServerState(settings)
        self.vocabulary = Vocabulary(engine.pair.tokenizer)
        self.prompts = PromptBuilder(
            engine.pair.tokenizer, engine.window, settings.allow_special_tokens, settings.images == "refuse"
        )
        self.tool_orders = ToolOrders()
        self.sampling = _default_sampling(engine.pair.sampling, settings)
        self.metrics = metrics or Metrics(engine, self.model_id)
        self.format = detect(engine.pair.tokenizer, settings.tool_parser, settings.reasoning_parser)
        if not self.prompts.takes_tools:
            logger.warning("%s: its chat template has no place for tools: agents can't call any", self.model_id)
        elif self.format.tools is None:
            logger.warning("%s: the notation of its tool calls is unknown: they may come as text", self.model_id)

    @property
    def context_length(self) -> int:
        """The largest number of tokens of prompt and answer. Memory may leave room for fewer than the model allows."""
        return self.engine.window

    @property
    def model_id(self) -> str:
        """The model's id: an alias, never a path of this machine."""
        return self.settings.model_alias or short_name(self.engine.pair.target_id) or "default"

    @property
    def draft_id(self) -> str | None:
        """The draft's id; None if no draft is loaded."""
        draft = self.engine.pair.draft_id
        return None if draft is None else short_name(draft)

    async def constrain(self, make: Callable[[], Constraint]) -> Constraint:
        """Make a grammar and compile it before `submit` needs it, on the worker that has the tokenizer to itself.

        Raises:
            InvalidRequestError: what is wrong with the grammar, or with what it is made of.
        """
        return await self.prompts.workers.run(partial(self._constrain, make))

    def _constrain(self, make: Callable[[], Constraint]) -> Constraint:
        constraint = make()
        self.engine.compile(constraint)
        return constraint

    def submit(
        self,
        specs: Sequence[AnswerSpec],
        identity: Identity,
        cache_salt: str | None,
        warnings: Sequence[str] = (),
        copies: int = 1,
    ) -> Generation:
        """Start `copies` answers to each spec. They share cached prompts only with this identity and salt.

        Raises:
            EngineClosedError: shutting down, or the engine takes nothing more.
        """
        self.state.refuse_when_stopping()
        specs = [replace(spec, request=_asked_by(spec.request, identity, cache_salt)) for spec in specs]
        previous = self.state.verdicts.previous(identity.name, specs[0].request) if self.engine.verifies else None
        observer = AnswerObserver(self, [spec.request for spec in specs for _ in range(copies)], identity)
        generation = Generation(self.engine, specs, copies, self.state.calls(), observer, warnings, previous)
        self.state.add(generation, observer.line)
        return generation

    async def inspect(self, request: GenerationRequest, identity: Identity, cache_salt: str | None) -> Inspection:
        """Return an inspection; raises as `submit`. It stops within one prefill chunk of a cancellation."""
        self.state.refuse_when_stopping()
        request = _asked_by(request, identity, cache_salt)
        result: asyncio.Future[Inspection] = asyncio.get_running_loop().create_future()

        def settle(end: Inspection | Exception) -> None:
            if result.done():  # cancelled
                return
            if isinstance(end, Exception):
                result.set_exception(end)
            else:
                result.set_result(end)

        handle = self.engine.submit_inspection(request, lambda _: None, partial(self.state.calls().post, settle))
        self.state.inspections.add(handle)
        try:
            return await result
        finally:
            handle.cancel()
            self.state.inspections.discard(handle)


class AnswerObserver:
    """A reporter of one request's answers to the metrics, the log, the statistics and the verdicts.

    Attributes:
        line: the request in the statistics.
    """

    def __init__(self, service: Service, requests: Sequence[GenerationRequest], identity: Identity) -> None:
        self._service = service
        self._requests = requests
        self._identity = identity.name
        self._verdicts: dict[int, AnswerVerdict] = {}
        self._trace = current_trace()
        self._request_id = None if self._trace is None else self._trace.id
        self.line = RunningRequest(self._request_id, identity.name, len(requests[0].prompt))
        if self._trace is not None:
            self._trace.running += len(requests)

    def on_event(self, event: Event) -> None:
        """Take an event as it arrives."""
        self.line.update(event)

    def on_end(self, result: AnswerResult) -> None:
        """Take an answer's result, before its end is streamed."""
        self._service.metrics.record(result)
        entry = recent_answer(result, self._request_id)
        self._service.state.recent.add(self._identity, entry, self._requests[result.index].made)
        if result.will_be_verified:
            self._verdict(result.index)
        if self._trace is not None:
            self._trace.add_answer(result)

    def on_verdict(self, index: int, verdict: Verdict, marks: Sequence[Mark]) -> None:
        """Take the verdict on answer `index` and the places of its calls."""
        service, state = self._service, self._service.state
        self._verdict(index).tell(verdict, marks, service.vocabulary.decode)
        state.verdicts.count(self._identity, verdict.word)
        service.metrics.record_verdict(verdict.word)

    def _verdict(self, index: int) -> AnswerVerdict:
        """Return the verdict on an answer. The answer is listed when this is first asked."""
        if index not in self._verdicts:
            model, request = self._service.model_id, self._requests[index]
            self._verdicts[index] = AnswerVerdict(self._request_id, index, model, request)
            self._service.state.verdicts.add(self._identity, self._verdicts[index], request.made)
        return self._verdicts[index]


def _asked_by(request: GenerationRequest, identity: Identity, cache_salt: str | None) -> GenerationRequest:
    """Return the request with its label and the time at which it came. Its prompt was made from it since."""
    trace = current_trace()
    made = request.made if trace is None else trace.made
    return replace(request, label=identity.cache_label(cache_salt), made=made)


def current_deadline() -> tuple[float, DeadlineError] | None:
    """Return the current request's deadline by the event loop's clock, and the error at that time."""
    trace = current_trace()
    return None if trace is None else trace.deadline


def _default_sampling(stated: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return the sampling of requests that leave it open: the setting's temperature if it is set, else the model's."""
    try:
        sampling = SamplingFields.model_validate(stated).given({})
    except ValidationError as error:
        first = error.errors()[0]
        logger.warning("generation_config.json is not followed: %s: %s", first["loc"][0], first["msg"])
        sampling = {}
    own = {"temperature": settings.temperature}
    return sampling | own if "temperature" in settings.model_fields_set else own | sampling


async def client_left(receive: Receive) -> None:
    """Return when the client has left. The body has been read, so no other message can follow."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it as soon as the client hangs up.

    Raises:
        ClientDisconnect: the client left.
        DeadlineError: the request has no time left.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(client_left(request.receive))
    deadline = current_deadline()
    left = None if deadline is None else deadline[0] - asyncio.get_running_loop().time()
    try:
        await asyncio.wait((task, watch), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect if deadline is None or watch.done() else deadline[1]
        return await task
    finally:
        task.cancel()
        watch.cancel()


B = TypeVar("B", bound=ChatFields)


class Answer(Protocol):
    """The answers to one request in a dialect."""

    def stream(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream. The first ones go out before the engine has done anything."""

    def collect(self) -> Coroutine[Any, Any, dict[str, Any]]:
        """Return the whole response; raises SpecPrefillError."""


async def serve(
    request: Request, service: Service, identity: Identity, body: B, dialect: Callable[[Service, B, Generation], Answer]
) -> Response:
    """Answer a conversation in a dialect."""
    generation = await while_connected(request, start_answers(service, body, identity))
    return await respond(request, generation, dialect(service, body, generation), streamed=body.stream)


async def respond(request: Request, generation: Generation, answer: Answer, *, streamed: bool) -> Response:
    """Return a stream of the answers, or all of them when they are done. Close the generation in any case."""
    if streamed:
        return EventStream(answer.stream(), generation)
    try:
        return JsonResponse(await while_connected(request, answer.collect()))
    finally:
        generation.close()


async def start_answers(service: Service, body: ChatFields, identity: Identity) -> Generation:
    """Render the conversation and start its answers. The caller must close the generation.

    Raises:
        InvalidRequestError, ContextLengthError: no answer has been started.
        EngineClosedError: the engine takes no more requests.
    """
    conversation, choice, output = body.conversation(), body.choice(), body.output()
    if conversation.tools or choice != "auto":
        tools, choice = resolve_tool_choice(conversation.tools, choice)
        tools = service.tool_orders.sort(tools, identity.cache_label(body.cache_salt))
        conversation = replace(conversation, tools=tools)
    params = await sampling_params(service, body)
    prompt = await service.prompts.chat(conversation)
    forced = choice not in ("auto", "none")
    warnings = list(prompt.left_out)
    if conversation.tools and not (forced or service.prompts.takes_tools):
        warnings.append("the model's chat template has no place for tools: the model is not told of them")
    constraint: Constraint | None = None
    if output is not None or forced:
        make = partial(
            constraint_of,
            output,
            conversation.tools,
            choice,
            service.format.tools or ("hermes" if forced else None),  # a template without calls: any notation will do
            body.parallel(),
            service.format.reasoning_end(prompt.ending),
            service.format.may_think(prompt.ending) if _thinks(body, conversation) else None,
            service.vocabulary.special,
            warnings,
        )
        constraint = await service.constrain(make)
    budget = body.thinking_budget()
    spec = make_spec(
        service,
        body,
        params,
        prompt,
        partial(service.format.parser, conversation.tools, prompt.ending),
        field=conversation.field,
        constraint=constraint,
        reasoning=None if budget is None else service.format.budget(budget, prompt.ending),
        parallel=body.parallel(),
        forced=forced,
    )
    return service.submit([spec], identity, body.cache_salt, warnings, body.answers())


def _thinks(body: ChatFields, conversation: Conversation) -> bool:
    """Return whether the request leaves room for reasoning before a format or a forced call."""
    off = conversation.template_kwargs.get("enable_thinking") is False or body.thinking_budget() == 0
    return conversation.ending == "answer" and not off


async def sampling_params(service: Service, fields: SamplingFields) -> SamplingParams:
    """Return the engine's sampling parameters. A forbidden word is forbidden at the start of a text and inside one."""
    params = fields.sampling(service.sampling, service.vocabulary)
    words = [text for word in fields.bad_words for text in (word.lstrip(), f" {word.lstrip()}")]
    ids = [tuple(await service.prompts.tokens(word, special=False, field="bad_words")) for word in words]
    return replace(params, bad_words=tuple(dict.fromkeys(filter(None, ids))))


async def count_tokens(request: Request, service: Service, conversation: Conversation, choice: ToolChoice) -> int:
    """Return the length of the prompt that `start_answers` would make; raises as it does."""
    tools, _ = resolve_tool_choice(conversation.tools, choice)
    prompt = await while_connected(request, service.prompts.chat(replace(conversation, tools=tools)))
    return len(prompt.tokens)


def make_spec(
    service: Service,
    body: AnswerFields,
    params: SamplingParams,
    prompt: Prompt,
    parser: Callable[[], Parser],
    *,
    field: str,
    prompt_logprobs: int | None = None,
    constraint: Constraint | None = None,
    reasoning: ReasoningBudget | None = None,
    parallel: bool = True,
    forced: bool = False,
    every_token: bool = False,
) -> AnswerSpec:
    """Return the engine's request for one answer to `prompt`, at most as long as the remaining context, and its reader.

    Args:
        field: field of the body that holds the prompt.
        parallel, forced, every_token: as in AnswerReader.

    Raises:
        InvalidRequestError: the prompt has no tokens.
        ContextLengthError: the prompt leaves no room for an answer.
    """
    if not prompt.tokens.size:
        raise refusal(field, "the prompt has no tokens")
    room = max_tokens_within(len(prompt.tokens), body.limit(), service.context_length, field)
    # `ignore_eos` has no effect with a grammar, which ends by itself
    ignored = body.ignore_eos and constraint is None
    ends = frozenset() if ignored else service.vocabulary.stop_ids | service.format.ends
    request = GenerationRequest(
        prompt=prompt.tokens,
        max_tokens=room,
        sampling=params,
        specprefill=replace(body.options(), verify=service.engine.verifies),
        spans=prompt.spans,
        stop_token_ids=frozenset(body.stop_token_ids) | ends,
        logprobs=body.alternatives(),
        prompt_logprobs=prompt_logprobs,
        constraint=constraint,
        reasoning=reasoning,
        min_tokens=min(body.min_tokens, room),
    )
    shown_ids = frozenset(body.stop_token_ids if body.include_stop_str_in_output else ())

    def reader() -> AnswerReader:
        return AnswerReader(
            IncrementalDetokenizer(service.vocabulary.decode, request.prompt),
            parser(),
            StopMatcher(body.stops(), body.include_stop_str_in_output),
            end_ids=request.stop_token_ids - shown_ids,
            parallel=parallel,
            forced=forced,
            with_tokens=body.with_ids() or request.logprobs is not None,
            every_token=every_token,
            turn_end=None if ignored else service.engine.pair.turn_end,
        )

    return AnswerSpec(request, reader)


def max_tokens_within(prompt_tokens: int, asked: int | None, context_length: int, field: str) -> int:
    """Return the largest number of tokens an answer may have.

    A limit beyond the window is cut, not refused: agents ask for their maximum on every call.

    Raises:
        ContextLengthError: not one token fits.
    """
    left = context_length - prompt_tokens
    least = 0 if asked == 0 else 1
    if left < least:
        raise ContextLengthError(prompt_tokens, least, context_length, field)
    return left if asked is None else min(asked, left)
