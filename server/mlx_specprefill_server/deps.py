"""What every endpoint shares: the service behind the app, the request body, and the watch on the client."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Annotated, Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from fastapi import Depends, Request
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from mlx_specprefill import Constraint, EngineClosedError, GenerationRequest, RequestCancelled

from .errors import ApiError, DeadlineError, QueueTimeoutError
from .explaining.inspection import RunningInspection
from .generating.engine_protocol import EngineLike
from .generating.event_loop import LoopCalls
from .generating.generation import Generation, Job, Outcome
from .generating.vocabulary import Vocabulary
from .identity import Identity
from .monitoring.access_log import current_exchange
from .monitoring.metrics import Metrics
from .monitoring.recent import RecentAnswers
from .monitoring.running import RunningRequest
from .parsers.formats import detect
from .prompting.prompt import PromptBuilder
from .request_body import SMALL, decompress, parse_json, read_body, validate
from .settings import Settings

__all__ = ["Service", "ServiceDep", "body_of", "close_on_disconnect", "while_connected"]

CONVERTERS = 2  # threads; they compete with the event loop for the interpreter
PATIENCE_S = 5.0  # for the engine to end an answer itself, which it does between two of its steps
REPOSITORY = re.compile(r"\w[\w.-]*/[\w.-]+")

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)


class Service:
    """Engine, tokenizer and settings as one application uses them."""

    def __init__(self, engine: EngineLike, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings
        self.vocabulary = Vocabulary(engine.pair.tokenizer)
        self.prompts = PromptBuilder(engine.pair.tokenizer, engine.window, settings.allow_special_tokens)
        self.metrics = Metrics(engine, self.model_id)
        self.recent = RecentAnswers()
        self.format = detect(engine.pair.tokenizer, settings.tool_parser, settings.reasoning_parser)
        self.started = int(time.time())
        self._live: WeakSet[Generation | RunningInspection] = WeakSet()
        self._lines: WeakKeyDictionary[Generation, RunningRequest] = WeakKeyDictionary()
        self._loop_calls: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopCalls] = WeakKeyDictionary()
        self._converters = ThreadPoolExecutor(CONVERTERS, thread_name_prefix="bodies")
        self.requests = 0  # POST requests that have no response yet
        self.draining = False  # running requests may finish, new ones are refused
        self.stopping = False

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer; less than the model's where memory has no room for these."""
        return self.engine.window

    @property
    def model_id(self) -> str:
        """An alias, never a path of this machine."""
        return self.settings.model_alias or _short(self.engine.pair.target_id) or "default"

    @property
    def draft_id(self) -> str | None:
        """None: no draft is loaded."""
        return _short(self.engine.pair.draft_id)

    async def convert(self, call: Callable[[], T], large: bool) -> T:
        """What is made of a body: beside the event loop, unless it takes no time."""
        if not large:
            return call()
        return await asyncio.get_running_loop().run_in_executor(self._converters, call)

    async def compile(self, constraint: Constraint | None) -> None:
        """Compile a grammar before `submit` needs it, on the worker that has the tokenizer to itself.

        Raises:
            InvalidRequestError: what is wrong with the grammar.
        """
        if constraint is not None:
            await self.prompts.run(partial(self.engine.compile, constraint))

    def submit(
        self, jobs: Sequence[Job], identity: Identity, cache_salt: str | None, warnings: Sequence[str] = ()
    ) -> Generation:
        """Starts all jobs, which share cached prompts with this identity's other requests of the same salt only.

        Raises:
            EngineClosedError: shutting down, or the engine takes nothing more.
        """
        self._refuse_when_stopping()
        label = identity.cache_label(cache_salt)
        jobs = [replace(job, request=replace(job.request, label=label)) for job in jobs]
        loop = asyncio.get_running_loop()
        calls = self._loop_calls.setdefault(loop, LoopCalls(loop))
        on_end = self._counted(len(jobs), identity)
        exchange = current_exchange()
        line = RunningRequest(None if exchange is None else exchange.id, identity.name, len(jobs[0].request.prompt))
        generation = Generation(self.engine, jobs, calls, on_end, self.settings.stream_buffer, warnings, line.saw)
        self._live.add(generation)
        self._lines[generation] = line
        if (deadline := _deadline()) is not None:
            generation.end_at(*deadline)
        if (patience := self.settings.queue_timeout_s) is not None:
            generation.begin_within(patience, QueueTimeoutError(patience))
        return generation

    def running(self, identity: str | None) -> list[RunningRequest]:
        """Requests in work, oldest first, as `RecentAnswers.newest_first` shows them to one API key or to all."""
        lines = [line for generation, line in self._lines.items() if generation.running]
        return sorted((one for one in lines if identity in (None, one.identity)), key=lambda line: line.begun)

    def inspect(self, request: GenerationRequest, identity: Identity, cache_salt: str | None) -> RunningInspection:
        """Starts an inspection; raises as `submit`."""
        self._refuse_when_stopping()
        work = RunningInspection(self.engine, replace(request, label=identity.cache_label(cache_salt)))
        self._live.add(work)
        if (deadline := _deadline()) is not None:
            work.end_at(*deadline)
        return work

    def _refuse_when_stopping(self) -> None:
        if self.stopping:
            raise EngineClosedError("the server is shutting down")

    def _counted(self, answers: int, identity: Identity) -> Callable[[Outcome], None]:
        """Tells the metrics and the request's line in the log how answers ended."""
        exchange = current_exchange()
        if exchange is not None:
            exchange.running += answers

        def ended(outcome: Outcome) -> None:
            self.metrics.ended(outcome)
            self.recent.add(outcome, None if exchange is None else exchange.id, identity.name)
            if exchange is not None:
                exchange.ended(outcome)

        return ended

    def stop(self) -> None:
        """Ends all running answers, so that each stream closes properly, and refuses new ones."""
        self.draining = self.stopping = True
        for work in list(self._live):
            work.stop(PATIENCE_S)


def _deadline() -> tuple[float, DeadlineError] | None:
    """When the current request has to end, by the event loop's clock, and what it fails with then."""
    exchange = current_exchange()
    if exchange is None or exchange.deadline is None:
        return None
    return exchange.deadline, DeadlineError(exchange.timeout_s)


def _short(model: str | None) -> str | None:
    """`org/name` and plain names as they are; of a path only its end."""
    if model is None or REPOSITORY.fullmatch(model):
        return model
    return PurePath(model).name


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceDep = Annotated[Service, Depends(_service)]


def body_of(model: type[Model], check: Callable[[dict[str, Any]], None]) -> Callable[..., Awaitable[Model]]:
    """A dependency that reads a JSON body whatever its content type says (`curl -d` calls JSON a form).

    Args:
        check: sees the raw body first, and raises InvalidRequestError on what the dialect refuses by name.
    """

    def checked(service: Service, raw: bytes | bytearray, encoding: str) -> Model:
        given = parse_json(decompress(raw, encoding, service.settings.body_limit))
        _check_model(service, given.get("model"))
        check(given)
        return validate(model, given)

    async def parse(request: Request, service: ServiceDep) -> Model:
        raw = await read_body(request, service.settings.body_limit)
        encoding = request.headers.get("content-encoding", "")
        return await service.convert(partial(checked, service, raw, encoding), large=len(raw) > SMALL or bool(encoding))

    parse.body_model = model  # type: ignore[attr-defined] # for the API's document
    return parse


def _check_model(service: Service, name: Any) -> None:
    """Any name will do, unless the settings say otherwise: clients call the one model what they like."""
    if service.settings.strict_model and name is not None and name != service.model_id:
        message = f"The model {name!r:.100} is not loaded; {service.model_id!r} is."
        raise ApiError(404, message, param="model", code="model_not_found")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, and gives it up as soon as the client hangs up.

    Raises:
        ClientDisconnect: the client left.
        DeadlineError: the request has no time left.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(request))
    deadline = _deadline()
    left = None if deadline is None else deadline[0] - asyncio.get_running_loop().time()
    try:
        await asyncio.wait((task, watch), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect if deadline is None or watch.done() else deadline[1]
        return await task
    finally:
        task.cancel()
        watch.cancel()


async def close_on_disconnect(request: Request, generation: Generation | RunningInspection, work: Awaitable[T]) -> T:
    """Awaits `work`, and closes its generation as soon as the client hangs up.

    Raises:
        ClientDisconnect: the client left.
    """
    watch = asyncio.create_task(_until_disconnect(request, generation))
    try:
        return await work
    except (EngineClosedError, RequestCancelled) as error:
        if watch.done():
            raise ClientDisconnect from error
        raise
    finally:
        watch.cancel()
        generation.close()


async def _until_disconnect(request: Request, generation: Generation | RunningInspection) -> None:
    await _disconnected(request)
    generation.close()


async def _disconnected(request: Request) -> None:
    """The body has been read, so the next message can only be the disconnect."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
