"""An engine in this process as examinee: every arm goes through the engine's one path of plan, selection and prefill.

Arms differ in the scores that a request brings along. Positions that are not restored are a full prefill of what the
sparse arm kept. Nothing here knows arrays of any model: distributions come from `Engine.replay`.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from mlx_specprefill import (
    Account,
    Engine,
    EngineConfig,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Inspection,
    Replay,
    SelectionConfig,
    SpecPrefillError,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    TokenEvent,
)

from ..prompting.conversation import conversation
from ..prompting.prompt import Prompt, PromptBuilder
from . import rankings
from .arms import FULL, Arm
from .errors import NotMeasuredError
from .examinee import Reply
from .tasks import Item

__all__ = ["LocalExaminee", "examination"]

PROBED_TOKENS = 64  # of the dense answer, teacher-forced
CONTINUED_TOKENS = 256  # of the document, for perplexity
QUESTION_TOKENS = 64  # at the end of the last message: the query of the lexical arm

Span = tuple[int, int]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


def examination(selection: SelectionConfig | None = None) -> EngineConfig:
    """Nothing that one answer leaves behind may help or hinder the next one."""
    policy = SpecPrefillPolicy(densify=False)
    return EngineConfig(selection=selection or SelectionConfig(), policy=policy, prefix_cache_bytes=0)


@dataclass(frozen=True)
class _Answer:
    tokens: tuple[int, ...]
    account: Account

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.account.kept_spans or ()


class LocalExaminee:
    """Args:
    engine: running, with its prefix cache off: what an earlier arm left behind must not help a later one.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._builder = PromptBuilder(engine.pair.tokenizer)

    @property
    def described(self) -> Mapping[str, str | int]:
        pair, chunk_size = self._engine.pair, self._engine.config.selection.chunk_size
        return {"target": str(pair.target_id), "draft": str(pair.draft_id or "none"), "chunk_size": chunk_size}

    def count(self, text: str) -> int:
        return len(self._engine.pair.tokenizer.encode(text, add_special_tokens=False))

    def ask(self, item: Item, arms: Sequence[Arm], answer_tokens: int, seed: int, probe: bool) -> dict[Arm, Reply]:
        try:
            question = _Question(self._engine, *self._rendered(item), answer_tokens, seed)
            applicable = [arm for arm in arms if arm.kind != "oracle" or item.gold]
            answers = question.answers(applicable)
            measures = {arm: question.selection_measures(arm, answers) for arm in answers}
            if probe:
                ratios = self._perplexity_ratios(item, applicable, seed)
                for arm, more in question.probed(answers).items():
                    measures[arm] |= more | ratios.get(arm, {})
        except SpecPrefillError as error:
            raise NotMeasuredError(str(error)) from error
        return {arm: self._reply(answer, measures[arm]) for arm, answer in answers.items()}

    def _perplexity_ratios(self, item: Item, arms: Sequence[Arm], seed: int) -> dict[Arm, dict[str, float]]:
        """The document's last tokens after what comes before them, without question or template."""
        tokens = tuple(self._engine.pair.tokenizer.encode(item.turns[0].question, add_special_tokens=False))
        if len(tokens) < 2 * CONTINUED_TOKENS:
            return {}
        prompt, continuation = Prompt(tokens[:-CONTINUED_TOKENS]), tokens[-CONTINUED_TOKENS:]
        wanted = [arm for arm in arms if arm.kind != "oracle"]
        return _Question(self._engine, prompt, (), 1, seed).perplexity_ratios(wanted, continuation)

    def _reply(self, answer: _Answer, measures: Mapping[str, float]) -> Reply:
        stops = self._engine.pair.eos_token_ids
        text = self._engine.pair.tokenizer.decode([token for token in answer.tokens if token not in stops])
        return Reply(text, answer.account.kept_tokens / answer.account.prompt_tokens, measures)

    def _rendered(self, item: Item) -> tuple[Prompt, tuple[Span, ...]]:
        """The conversation up to the last question, earlier answers as they should be, and where its gold lies."""
        messages: list[dict[str, str]] = []
        for turn in item.turns:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer})
        said = conversation(messages[:-1])
        return asyncio.run(self._builder.chat(said)), asyncio.run(self._builder.passages(said, item.gold))


class _Question:
    """One prompt on its way through all arms."""

    def __init__(self, engine: Engine, prompt: Prompt, gold: tuple[Span, ...], answer_tokens: int, seed: int) -> None:
        self._engine = engine
        self._prompt = prompt
        self._gold = gold
        self._answer_tokens = answer_tokens
        self._seed = seed
        self._chunk = engine.config.selection.chunk_size

    @cached_property
    def _inspection(self) -> Inspection:
        """The draft is asked once, however many shares are kept."""
        return self._engine.inspect(self._request(SpecPrefillOptions(enabled=True)))

    def answers(self, arms: Sequence[Arm]) -> dict[Arm, _Answer]:
        requests = {arm: self._options(arm) for arm in arms if arm.kind != "renumbered"}
        for arm in arms:
            if arm.kind == "renumbered":
                requests.setdefault(Arm("sparse", arm.keep), self._options(Arm("sparse", arm.keep)))
        answers = _gather(self._engine, {arm: self._request(options) for arm, options in requests.items()})
        self._check_modes(answers)
        renumbered = [arm for arm in arms if arm.kind == "renumbered"]
        cut = {arm: self._cut(answers[Arm("sparse", arm.keep)].spans) for arm in renumbered}
        answers |= {
            arm: replace(answer, account=answers[Arm("sparse", arm.keep)].account)
            for arm, answer in _gather(self._engine, cut).items()
        }
        return {arm: answers[arm] for arm in arms}

    def _check_modes(self, answers: Mapping[Arm, _Answer]) -> None:
        for arm, answer in answers.items():
            if (answer.account.mode == "sparse") != (arm != FULL):
                raise NotMeasuredError(f"arm {arm.name} ran in {answer.account.mode} mode: {answer.account.reason}")

    def _request(self, options: SpecPrefillOptions) -> GenerationRequest:
        return GenerationRequest(
            self._prompt.tokens,
            self._answer_tokens,
            specprefill=options,
            spans=self._prompt.spans,
            stop_token_ids=self._engine.pair.eos_token_ids,
        )

    def _cut(self, spans: Sequence[Span]) -> GenerationRequest:
        """What was kept, as if it were the whole prompt."""
        tokens = tuple(token for start, end in spans for token in self._prompt.tokens[start:end])
        return replace(self._request(SpecPrefillOptions(enabled=False)), prompt=tokens, spans=())

    def _options(self, arm: Arm) -> SpecPrefillOptions:
        if arm == FULL:
            return SpecPrefillOptions(enabled=False, return_spans=True)
        prompt, M = self._prompt.tokens, len(self._prompt.tokens)
        score: dict[str, Callable[[], Floats]] = {
            "sparse": lambda: self._inspection.importance,
            "random": partial(rankings.random_chunks, M, self._chunk, self._seed),
            "recency": partial(rankings.by_recency, M),
            "lexical": partial(rankings.by_overlap, prompt, self._chunk, prompt[self._question_start() :]),
            "oracle": partial(rankings.gold_first, M, self._chunk, self._gold, self._seed),
        }
        return SpecPrefillOptions(True, arm.keep, return_spans=True, importance=score[arm.kind]())

    def _question_start(self) -> int:
        end = self._prompt.spans[-1].content_end if self._prompt.spans else len(self._prompt.tokens)
        return max(0, end - QUESTION_TOKENS)

    # --- measures ----------------------------------------------------------------------------------------------------

    def selection_measures(self, arm: Arm, answers: Mapping[Arm, _Answer]) -> dict[str, float]:
        """Share of the chunks with gold in them whose gold was kept."""
        if arm == FULL or not self._gold:
            return {}
        kept, gold = self._mask(answers[arm].spans), self._mask(self._gold)
        starts = np.arange(0, kept.size, self._chunk)
        needed = np.add.reduceat(gold, starts, dtype=np.int64)
        found = np.add.reduceat(gold & kept, starts, dtype=np.int64)
        return {"recall": float((found == needed)[needed > 0].mean())}

    def probed(self, answers: Mapping[Arm, _Answer]) -> dict[Arm, dict[str, float]]:
        """Distributions over the first tokens of the dense answer, and the attention mass that was kept.

        What a model says behind the end of its answer is noise, and would be most of a short one.
        """
        dense = replace(self._request(SpecPrefillOptions(enabled=False)), max_tokens=PROBED_TOKENS)
        continuation = _gather(self._engine, {FULL: dense})[FULL].tokens
        full = self._engine.replay(dense, continuation, attention=True)
        measures = {}
        for arm, answer in answers.items():
            if arm != FULL:
                replayed = self._engine.replay(self._replayed(arm, answer), continuation)
                measures[arm] = divergence(full, replayed) | self._mass(full, answer)
        return measures

    def perplexity_ratios(self, arms: Sequence[Arm], continuation: tuple[int, ...]) -> dict[Arm, dict[str, float]]:
        """Perplexity of the continuation after each arm's prefill over that after a full one."""
        answers = {arm: answer for arm, answer in self.answers(arms).items() if arm != FULL}
        full = _surprise(self._engine.replay(self._request(self._options(FULL)), continuation), continuation)
        surprises = {
            arm: _surprise(self._engine.replay(self._replayed(arm, answer), continuation), continuation)
            for arm, answer in answers.items()
        }
        return {arm: {"ppl_ratio": float(np.exp(surprise - full))} for arm, surprise in surprises.items()}

    def _replayed(self, arm: Arm, answer: _Answer) -> GenerationRequest:
        return self._cut(answer.spans) if arm.kind == "renumbered" else self._request(self._options(arm))

    def _mass(self, full: Replay, answer: _Answer) -> dict[str, float]:
        """Of the target's attention to what is open to selection, the share that falls on what was kept."""
        if full.attention is None:
            return {}
        open_to_choice = ~self._mask([(start, end) for start, end, _ in self._inspection.forced_ranges])
        total = float(full.attention[open_to_choice].sum())
        held = float(full.attention[open_to_choice & self._mask(answer.spans)].sum())
        return {"mass": held / total} if total > 0 else {}

    def _mask(self, spans: Sequence[Span]) -> Bools:
        mask = np.zeros(len(self._prompt.tokens), dtype=np.bool_)
        for start, end in spans:
            mask[start:end] = True
        return mask


def divergence(full: Replay, other: Replay) -> dict[str, float]:
    """KL(full || other) in nats and the agreement of the likeliest token, means over the continuation."""
    p, q = full.logprobs.astype(np.float64), other.logprobs.astype(np.float64)
    return {
        "kl": float((np.exp(p) * (p - q)).sum(axis=1).mean()),
        "top1": float((p.argmax(axis=1) == q.argmax(axis=1)).mean()),
    }


def _surprise(replay: Replay, continuation: Sequence[int]) -> float:
    """Mean negative log-probability, nats per token."""
    return -float(replay.logprobs[np.arange(len(continuation)), list(continuation)].astype(np.float64).mean())


def _gather(engine: Engine, requests: Mapping[Arm, GenerationRequest]) -> dict[Arm, _Answer]:
    """All requests at the same time: their answers are decoded in one batch."""
    events: queue.SimpleQueue[tuple[Arm, Event]] = queue.SimpleQueue()
    handles = [engine.submit(request, partial(_put, events, arm)) for arm, request in requests.items()]
    try:
        return dict(_collected(events, requests))
    finally:
        for handle in handles:
            handle.cancel()


def _put(events: queue.SimpleQueue[tuple[Arm, Event]], arm: Arm, event: Event) -> None:
    events.put((arm, event))


def _collected(
    events: queue.SimpleQueue[tuple[Arm, Event]], requests: Mapping[Arm, GenerationRequest]
) -> Iterator[tuple[Arm, _Answer]]:
    tokens: dict[Arm, list[int]] = {arm: [] for arm in requests}
    waiting = len(requests)
    while waiting:
        arm, event = events.get()
        match event:
            case TokenEvent():
                tokens[arm].append(event.token)
            case Finished():
                waiting -= 1
                yield arm, _Answer(tuple(tokens[arm]), event.account)
            case Failed():
                raise NotMeasuredError(f"arm {arm.name} failed: {event.error}") from event.error
