"""The service of one loaded model: engine, tokenizer, default sampling, grammars; and who hears of each answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import ValidationError

from mlx_specprefill import Constraint, Engine, Event, GenerationRequest, Inspection, InvalidRequestError, Verdict

from ..constrained.answer_grammar import free_constraint
from ..fields import SamplingFields
from ..generation.generation import AnswerResult, AnswerSpec, Generation
from ..generation.reader import Vocabulary
from ..http.access_log import current_trace
from ..http.auth import Identity
from ..monitoring.answers import RunningRequest, recent_answer
from ..monitoring.metrics import Metrics
from ..monitoring.verdicts import AnswerVerdict
from ..notations.formats import detect
from ..pairs import short_name
from ..prompt.builder import PromptBuilder
from ..prompt.stable import ToolMemory
from ..settings.server import Settings
from .server_state import ServerState

logger = logging.getLogger(__name__)


class Service:
    """One loaded model: its engine, tokenizer and settings.

    Args:
        state: of the server; None: one of its own.
        metrics: that go on; None: new ones.
        aliases: further names that requests may give it.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        state: ServerState | None = None,
        metrics: Metrics | None = None,
        aliases: Sequence[str] = (),
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.aliases = aliases
        self.state = state or ServerState(settings)
        self.vocabulary = Vocabulary(engine.pair.tokenizer)
        self.prompts = PromptBuilder(engine.pair.tokenizer, engine.window, settings.template_kwargs)
        self.tools = ToolMemory(self.state.bodies)
        self.sampling = _default_sampling(engine.pair.sampling, settings)
        self.metrics = metrics or Metrics(engine, self.model_id)
        self.format = detect(engine.pair.tokenizer, settings.tool_parser, settings.reasoning_parser)
        if not self.prompts.takes_tools:
            logger.warning("%s: its chat template has no place for tools: agents can't call any", self.model_id)
        elif self.format.notation is None:
            logger.warning("%s: the notation of its tool calls is unknown: they may come as text", self.model_id)

    @property
    def context_length(self) -> int:
        """The largest number of tokens of prompt and answer. Memory may leave room for fewer than the model allows."""
        return self.engine.window

    @property
    def model_id(self) -> str:
        """The model's id: an alias, never a path of this machine."""
        return self.settings.model_alias or short_name(self.engine.pair.target_id) or "default"

    def other_name(self, name: str | None) -> list[str]:
        """Return the warning for a request that names another model, which this one answers."""
        if name is None or name in (self.model_id, *self.aliases):
            return []
        return [f"model: this server has no {name!r:.100}; {self.model_id!r} answers instead"]

    def warnings_of(self, name: str | None) -> dict[str, list[str]]:
        """Return that warning as a field of a response, if there is one."""
        warnings = self.other_name(name)
        return {"warnings": warnings} if warnings else {}

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

    async def constrain_freely(self, tools: Sequence[Mapping[str, Any]], warnings: list[str]) -> Constraint | None:
        """Return the compiled grammar of free answers whose calls of these tools follow their schemas. None, and a
        warning, where there is none.
        """
        return await self.prompts.workers.run(partial(self._constrain_freely, tools, warnings))

    def _constrain_freely(self, tools: Sequence[Mapping[str, Any]], warnings: list[str]) -> Constraint | None:
        if not tools:
            return None
        return free_constraint(tools, self.format.tools, self.vocabulary.special, self._objection, warnings)

    def _objection(self, constraint: Constraint) -> str:
        try:
            self.engine.compile(constraint)
        except InvalidRequestError as error:
            return str(error)
        return ""

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
        specs = [replace(spec, request=_labelled(spec.request, identity, cache_salt)) for spec in specs]
        observer = AnswerObserver(self, [spec.request for spec in specs for _ in range(copies)], identity)
        generation = Generation(self.engine, specs, copies, self.state.calls(), observer, warnings)
        self.state.add(generation, observer.line)
        return generation

    async def inspect(self, request: GenerationRequest, identity: Identity, cache_salt: str | None) -> Inspection:
        """Return an inspection; raises as `submit`. It stops within one prefill chunk of a cancellation."""
        self.state.refuse_when_stopping()
        request = _labelled(request, identity, cache_salt)
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

    def on_verdict(self, index: int, verdict: Verdict) -> None:
        """Take the verdict on answer `index`."""
        self._verdict(index).tell(verdict.word)
        self._service.state.verdicts.count(self._identity, verdict.word)
        self._service.metrics.record_verdict(verdict.word)

    def _verdict(self, index: int) -> AnswerVerdict:
        """Return the verdict on an answer. The answer is listed when this is first asked."""
        if index not in self._verdicts:
            made = self._requests[index].made
            self._verdicts[index] = AnswerVerdict(self._request_id, index, self._service.model_id)
            self._service.state.verdicts.add(self._identity, self._verdicts[index], made)
        return self._verdicts[index]


def _labelled(request: GenerationRequest, identity: Identity, cache_salt: str | None) -> GenerationRequest:
    """Return the request with its label and the time at which it came. Its prompt was made from it since."""
    trace = current_trace()
    made = request.made if trace is None else trace.made
    return replace(request, label=identity.cache_label(cache_salt), made=made)


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
