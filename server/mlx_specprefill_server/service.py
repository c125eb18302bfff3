"""The service that answers requests: one loaded model, and the state that all models of a server share."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from pydantic import ValidationError

from mlx_specprefill import (
    CacheLabel,
    Constraint,
    Engine,
    EngineClosedError,
    GenerationRequest,
    InvalidRequestError,
    Verdict,
)

from .auth import Identity
from .errors import DeadlineError, QueueTimeoutError
from .explain import RunningInspection
from .fields import SamplingFields
from .generation.generation import AnswerResult, AnswerSpec, Generation, ThreadsafeCalls
from .generation.reader import Mark, Vocabulary
from .monitoring.access_log import RecentAnswers, RunningRequest, current_trace
from .monitoring.metrics import Metrics
from .monitoring.verdicts import AnswerVerdict, Verdicts
from .parsers.formats import detect
from .promise import Promise, Promises, kind_of
from .prompt.conversation import Conversation
from .prompt.prompt import PromptBuilder
from .prompt.stable import KeptReasoning, ToolOrders
from .settings import Settings

__all__ = ["ServerState", "Service", "current_deadline"]

CONVERTERS = 2  # threads; they compete with the event loop for the interpreter
PATIENCE_S = 5.0  # seconds for the engine to end an answer itself, between two of its steps
REPOSITORY = re.compile(r"\w[\w.-]*/[\w.-]+")

T = TypeVar("T")
logger = logging.getLogger(__name__)


class ServerState:
    """The state that all models of one server share. Used on the event loop.

    Attributes:
        requests: POST requests that have no response yet.
        draining: running requests may finish, new ones are refused.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.started = int(time.time())
        self.recent = RecentAnswers()
        self.verdicts = Verdicts()
        self.promises = Promises(settings.promises_file, settings.max_differ)
        self.requests = 0
        self.draining = False
        self.stopping = False
        self._live: WeakSet[Generation | RunningInspection] = WeakSet()
        self._lines: WeakKeyDictionary[Generation, RunningRequest] = WeakKeyDictionary()
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

    def add(self, work: Generation | RunningInspection, line: RunningRequest | None = None) -> None:
        """Add a task that ends when the server stops. Its line is listed while it runs."""
        self._live.add(work)
        if line is not None and isinstance(work, Generation):
            self._lines[work] = line
        if (deadline := current_deadline()) is not None:
            work.end_at(*deadline)

    def running(self, identity: str | None) -> list[RunningRequest]:
        """Return the running requests, oldest first, of one API key or of all, as `RecentAnswers.newest_first`."""
        lines = [line for generation, line in self._lines.items() if generation.running]
        return sorted((one for one in lines if identity in (None, one.identity)), key=lambda line: line.begun)

    def refuse_when_stopping(self) -> None:
        """Refuse requests while the server stops.

        Raises:
            EngineClosedError: the server is shutting down.
        """
        if self.stopping:
            raise EngineClosedError("the server is shutting down")

    def stop(self) -> None:
        """End all running answers so that each stream closes properly, and refuse new ones."""
        self.draining = self.stopping = True
        for work in list(self._live):
            work.stop(PATIENCE_S)


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
        stable = settings.stable_prompts
        self.prompts = PromptBuilder(
            engine.pair.tokenizer, engine.window, settings.allow_special_tokens, keep_volatile_lines=stable == "off"
        )
        self.reasoning = KeptReasoning() if stable == "reasoning" else None
        self._tool_orders = None if stable == "off" else ToolOrders()
        self.sampling = _default_sampling(engine.pair.sampling, settings)
        self.metrics = metrics or Metrics(engine, self.model_id)
        self.format = detect(engine.pair.tokenizer, settings.tool_parser, settings.reasoning_parser)
        if not self.prompts.takes_tools:
            logger.warning("%s: its chat template has no place for tools: agents can't call any", self.model_id)

    @property
    def context_length(self) -> int:
        """The largest number of tokens of prompt and answer. Memory may leave room for fewer than the model allows."""
        return self.engine.window

    @property
    def model_id(self) -> str:
        """The model's id: an alias, never a path of this machine."""
        return self.settings.model_alias or _short(self.engine.pair.target_id) or "default"

    @property
    def draft_id(self) -> str | None:
        """The draft's id; None if no draft is loaded."""
        return _short(self.engine.pair.draft_id)

    def stable(self, conversation: Conversation, label: CacheLabel) -> Conversation:
        """Return the conversation as this label's earlier requests had it: order of tools, and reasoning if kept."""
        if self._tool_orders is not None:
            conversation = replace(conversation, tools=self._tool_orders.kept(conversation.tools, label))
        return conversation if self.reasoning is None else self.reasoning.restored(conversation, label)

    async def compile(self, constraint: Constraint) -> None:
        """Compile a grammar before `submit` needs it, on the worker that has the tokenizer to itself.

        Raises:
            InvalidRequestError: what is wrong with the grammar.
        """
        await self.prompts.run(partial(self.engine.compile, constraint))

    def submit(
        self, specs: Sequence[AnswerSpec], identity: Identity, cache_salt: str | None, warnings: Sequence[str] = ()
    ) -> Generation:
        """Start all specs. They share cached prompts only with this identity's other requests of the same salt.

        Raises:
            EngineClosedError: shutting down, or the engine takes nothing more.
        """
        self.state.refuse_when_stopping()
        label = identity.cache_label(cache_salt)
        promise = self._promise(specs[0].request, identity)
        specs = [
            replace(spec, request=self._with_verdict(replace(spec.request, label=label), promise)) for spec in specs
        ]
        noted = self._noted([spec.request for spec in specs], identity)
        on_end = self._on_answer_end(len(specs), identity, noted)
        trace = current_trace()
        told = self.state.verdicts.previous(identity.name, specs[0].request) if self.engine.verifies else None
        line = RunningRequest(None if trace is None else trace.id, identity.name, len(specs[0].request.prompt))
        on_verdict = self._on_verdict(identity, noted, promise)
        generation = Generation(self.engine, specs, self.state.calls(), on_end, warnings, line.saw, on_verdict)
        if told is not None:
            generation.told["previous"] = told
        if promise is not None:
            generation.told["promise"] = promise.to_dict()
        self.state.add(generation, line)
        if (patience := self.settings.queue_timeout_s) is not None:
            generation.begin_within(patience, QueueTimeoutError(patience))
        return generation

    def inspect(self, request: GenerationRequest, identity: Identity, cache_salt: str | None) -> RunningInspection:
        """Start an inspection; raises as `submit`."""
        self.state.refuse_when_stopping()
        work = RunningInspection(self.engine, replace(request, label=identity.cache_label(cache_salt)))
        self.state.add(work)
        return work

    def _promise(self, request: GenerationRequest, identity: Identity) -> Promise | None:
        """Return the share for a request that leaves it to the server."""
        if request.specprefill.keep_pct != "auto":
            return None
        return self.state.promises.of(f"{self.model_id}:{identity.name}:{kind_of(request)}")

    def _with_verdict(self, request: GenerationRequest, promise: Promise | None) -> GenerationRequest:
        """Return the request with the promised share, and without a verdict where the engine can't give one.

        Raises:
            InvalidRequestError: the client wants one.
        """
        options = request.specprefill
        if not self.engine.verifies:
            if promise is not None or options.verify == "wait":
                field = "specprefill_keep_pct" if promise is not None else "specprefill_verify"
                message = f"{field}: this server verifies no answers: it has --densify off, or no prefix cache"
                raise InvalidRequestError(message, field=field)
            return replace(request, specprefill=replace(options, verify=None))
        if promise is None:
            return request
        if promise.share == 1:
            return replace(request, specprefill=replace(options, keep_pct=promise.share, enabled=False))
        verify = options.verify if promise.is_held else "wait"
        return replace(request, specprefill=replace(options, keep_pct=promise.share, verify=verify))

    def _noted(self, requests: Sequence[GenerationRequest], identity: Identity) -> Callable[[int], AnswerVerdict]:
        """Return a function that finds the verdict on an answer by its number. It lists the answer when first asked."""
        trace, answers = current_trace(), dict[int, AnswerVerdict]()
        name = None if trace is None else trace.id

        def noted(index: int) -> AnswerVerdict:
            if index not in answers:
                answers[index] = AnswerVerdict(name, index, self.model_id, requests[index])
                self.state.verdicts.add(identity.name, answers[index])
            return answers[index]

        return noted

    def _on_verdict(
        self, identity: Identity, noted: Callable[[int], AnswerVerdict], promise: Promise | None
    ) -> Callable[[int, Verdict, Sequence[Mark]], None]:
        """Return a function that notes the verdict on an answer."""

        def judged(index: int, verdict: Verdict, marks: Sequence[Mark]) -> None:
            noted(index).tell(verdict, marks, self.vocabulary.decode)
            self.state.verdicts.count(identity.name, verdict.word)
            self.metrics.record_verdict(verdict.word)
            if promise is not None and verdict.word != "unknown":
                self.state.promises.learn(promise.name, promise.share, verdict.word == "same")

        return judged

    def _on_answer_end(
        self, count: int, identity: Identity, noted: Callable[[int], AnswerVerdict]
    ) -> Callable[[AnswerResult], None]:
        """Return a function that reports an answer's end to the metrics and to the request's log line.

        Args:
            noted: lists an answer that will be verified.
        """
        trace = current_trace()
        if trace is not None:
            trace.running += count

        def ended(result: AnswerResult) -> None:
            self.metrics.record(result)
            name = None if trace is None else trace.id
            self.state.recent.add(result, name, identity.name)
            if result.will_be_verified:
                noted(result.index)
            if trace is not None:
                trace.add_answer(result)

        return ended


def current_deadline() -> tuple[float, DeadlineError] | None:
    """Return the current request's deadline by the event loop's clock, and the error at that time."""
    trace = current_trace()
    if trace is None or trace.deadline is None:
        return None
    return trace.deadline, DeadlineError(trace.timeout_s)


def _default_sampling(stated: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return the sampling of requests that leave it open: the setting's temperature if it is set, else the model's."""
    try:
        found = SamplingFields.model_validate(stated).given({})
    except ValidationError as error:
        first = error.errors()[0]
        logger.warning("generation_config.json is not followed: %s: %s", first["loc"][0], first["msg"])
        found = {}
    own = {"temperature": settings.temperature}
    return found | own if "temperature" in settings.model_fields_set else own | found


def _short(model: str | None) -> str | None:
    """Return `org/name` and plain names unchanged, and the last part of a path."""
    if model is None or REPOSITORY.fullmatch(model):
        return model
    return PurePath(model).name
