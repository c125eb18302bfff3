"""An engine in this process as the model under test.

Every arm goes through the engine's one path of plan, selection and prefill.

Arms differ in the scores that a request brings along. Positions that are not restored are a full prefill of what the
sparse arm kept. Nothing here knows arrays of any model: distributions come from `Engine.replay`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import queue
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    PrefillReport,
    Replay,
    SelectionConfig,
    SpecPrefillError,
    SpecPrefillPolicy,
    TokenEvent,
    as_token_ids,
)
from mlx_specprefill_server.prompt.builder import Prompt, PromptBuilder
from mlx_specprefill_server.prompt.conversation import conversation

from .arms import FULL, SERVED_KINDS, Arm
from .errors import NotMeasuredError
from .forced import Forced, check_mode, divergence, forced_replies, together
from .model_under_test import Reply
from .prompted import CHUNK, OWNER, Prompted, Span
from .statistics import rank_agreement
from .tasks import Item, Known

PROBED_TOKENS = 64  # of the dense answer, teacher-forced
CONTINUED_TOKENS = 256  # of the document, for perplexity
CACHE_BYTES = 4 << 30  # of one item's arms; they are kept apart by label and forgotten after the item


def examination(selection: SelectionConfig | None = None) -> EngineConfig:
    """Return a configuration without idle work, which one answer could leave behind for the next one."""
    policy = SpecPrefillPolicy(densify=False)
    return EngineConfig(selection=selection or SelectionConfig(), policy=policy, prefix_cache_bytes=CACHE_BYTES)


@dataclass(frozen=True)
class _Answer:
    tokens: tuple[int, ...]
    report: PrefillReport

    @property
    def spans(self) -> tuple[Span, ...]:
        return self.report.kept_spans or ()


class LocalModel:
    """Args:
    engine: a running engine of its own; its caches are dropped after every item.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._builder = PromptBuilder(engine.pair.tokenizer)

    @property
    def described(self) -> Mapping[str, str | int]:
        pair, chunk_size = self._engine.pair, self._engine.config.selection.chunk_size
        heads = "none" if pair.heads is None else _digest(json.dumps(pair.heads.to_dict(), sort_keys=True))
        names = {"target": str(pair.target_id), "draft": str(pair.draft_id or "none"), "heads": heads}
        return {**names, "chunk_size": chunk_size}

    def count(self, text: str) -> int:
        return len(self._encode(text))

    def ask(self, item: Item, arms: Sequence[Arm], answer_tokens: int, seed: int, probe: bool) -> dict[Arm, Reply]:
        for arm in arms:
            if arm.kind in SERVED_KINDS:
                raise NotMeasuredError(f"arm {arm.kind} needs a server: --url URL")
        applicable = [arm for arm in arms if arm.kind != "oracle" or item.gold or item.mentions]
        try:
            self._engine.drop_cached(owner=OWNER)  # of the item before
            if item.earlier:
                turns = (*item.earlier, item)
                return together([self._force(turn, applicable, seed, session=True) for turn in turns])
            if item.known is not None:
                return self._force(item, applicable, seed)
            return self._generate(item, applicable, answer_tokens, seed, probe)
        except SpecPrefillError as error:
            raise NotMeasuredError(str(error)) from error

    def _force(self, item: Item, arms: Sequence[Arm], seed: int, session: bool = False) -> dict[Arm, Reply]:
        known = item.known
        assert known is not None
        mentions: tuple[tuple[Span, ...], ...] = ()
        if known.raw:
            prompt, gold, forced = self._continued(item, known)
        else:
            prompt, gold, mentions = self._rendered(item)
            forced = Forced(*_behind(self._encode(known.opening), self._encode(known.opening + known.answer)))
        prompted = Prompted(self._engine, prompt, gold, 1, seed, session, mentions)
        return forced_replies(prompted, forced, arms, self._decode, keep=session)

    def _generate(
        self, item: Item, arms: Sequence[Arm], answer_tokens: int, seed: int, probe: bool
    ) -> dict[Arm, Reply]:
        question = _Question(self._engine, *self._rendered(item)[:2], answer_tokens, seed)
        answers = question.answers(arms)
        measures = {arm: question.found(arm, answer.spans) for arm, answer in answers.items()}
        if probe:
            ratios = self._perplexity_ratios(item, arms, seed)
            for arm, more in question.probed(answers).items():
                measures[arm] |= more | ratios.get(arm, {})
        return {arm: self._reply(answer, measures[arm]) for arm, answer in answers.items()}

    def _perplexity_ratios(self, item: Item, arms: Sequence[Arm], seed: int) -> dict[Arm, dict[str, float]]:
        """Return the ratios for the document's last tokens after the text before them, without question or template."""
        tokens = self._encode(item.turns[0].question)
        if len(tokens) < 2 * CONTINUED_TOKENS:
            return {}
        prompt, continuation = Prompt(as_token_ids(tokens[:-CONTINUED_TOKENS])), tokens[-CONTINUED_TOKENS:]
        wanted = [arm for arm in arms if arm.kind not in ("oracle", "full")]
        replies = forced_replies(
            Prompted(self._engine, prompt, (), 1, seed), Forced(continuation), [FULL, *wanted], str
        )
        full = replies[FULL].measures["nll"]
        return {arm: {"ppl_ratio": float(np.exp(replies[arm].measures["nll"] - full))} for arm in wanted}

    def _reply(self, answer: _Answer, measures: Mapping[str, float]) -> Reply:
        stops = self._engine.pair.eos_token_ids
        text = self._decode([token for token in answer.tokens if token not in stops])
        return Reply(text, answer.report.kept_tokens / answer.report.prompt_tokens, measures)

    def _rendered(self, item: Item) -> tuple[Prompt, tuple[Span, ...], tuple[tuple[Span, ...], ...]]:
        """Render the item's messages.

        Returns:
            The prompt, the places of its gold, and all places of each mention.
        """
        said = conversation(item.messages)
        prompt, text = asyncio.run(self._builder.chat(said)), asyncio.run(self._builder.text(said))
        if not item.gold and not item.mentions:
            return prompt, (), ()
        located = self._offsets(text, prompt)
        return prompt, _first(located, text, item.gold), tuple(_every(located, text, word) for word in item.mentions)

    def _continued(self, item: Item, known: Known) -> tuple[Prompt, tuple[Span, ...], Forced]:
        """Return a text to continue, the place of its gold, and its continuation."""
        text = item.turns[-1].question + known.opening
        head, all_tokens = (asyncio.run(self._builder.raw(said)).tokens for said in (text, text + known.answer))
        whole, start = _behind(head.tolist(), tuple(all_tokens.tolist()))
        gold = _first(self._offsets(text, Prompt(head)), text, item.gold) if item.gold else ()
        return Prompt(as_token_ids(whole[:start])), gold, Forced(whole[start:])

    def _offsets(self, text: str, prompt: Prompt) -> Sequence[Span]:
        """Return the characters [start, end) of each token of a prompt.

        Raises:
            NotMeasuredError: the prompt's text has other tokens.
        """
        tokenizer = self._engine.pair.tokenizer._tokenizer  # the wrapper forwards attributes, but not the call itself
        for special in (False, True):
            read = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
            if read["input_ids"] == prompt.tokens.tolist():
                return list(read["offset_mapping"])
        raise NotMeasuredError("passages can't be located in this prompt")

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._engine.pair.tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._engine.pair.tokenizer.decode(list(tokens)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _first(offsets: Sequence[Span], text: str, passages: Sequence[str]) -> tuple[Span, ...]:
    """Return the tokens of each passage's first occurrence.

    Raises:
        NotMeasuredError: a passage does not occur.
    """
    if not all(passage in text for passage in passages):
        raise NotMeasuredError("passages can't be located in this prompt")
    return tuple(_tokens_of(offsets, text.index(passage), len(passage)) for passage in passages)


def _every(offsets: Sequence[Span], text: str, word: str) -> tuple[Span, ...]:
    return tuple(_tokens_of(offsets, found.start(), len(word)) for found in re.finditer(re.escape(word), text))


def _tokens_of(offsets: Sequence[Span], start: int, length: int) -> Span:
    """Return the tokens [start, end) that hold these characters."""
    return (
        bisect_right(offsets, start, key=lambda span: span[1]),
        bisect_left(offsets, start + length, key=lambda span: span[0]),
    )


def _behind(head: Sequence[int], whole: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Return the tokens of a text, and the index after its beginning. A border may fall inside a token."""
    pairs = enumerate(zip(head, whole, strict=False))
    return whole, next((at for at, (one, other) in pairs if one != other), min(len(head), len(whole) - 1))


class _Question(Prompted):
    """One prompt on its way through all arms, and their answers."""

    def answers(self, arms: Sequence[Arm]) -> dict[Arm, _Answer]:
        restored = dict.fromkeys(arm.restored for arm in arms)
        answers = _gather(self.engine, {arm: self.request(arm) for arm in restored})
        for arm, answer in answers.items():
            check_mode(arm, answer.report)
        renumbered = [arm for arm in arms if arm.restored != arm]
        cut = {arm: self.cut(answers[arm.restored].spans) for arm in renumbered}
        answers |= {
            arm: replace(answer, report=answers[arm.restored].report)
            for arm, answer in _gather(self.engine, cut).items()
        }
        return {arm: answers[arm] for arm in arms}

    def probed(self, answers: Mapping[Arm, _Answer]) -> dict[Arm, dict[str, float]]:
        """Compare the distributions over the first tokens of the dense answer, and what the answer attends to.

        Text after the end of an answer is noise, and would be most of a short one.
        """
        dense = self.request(FULL)
        continuation = (answers.get(FULL) or self.answers([FULL])[FULL]).tokens[:PROBED_TOKENS]
        full = self.engine.replay(dense, continuation, attention=True)
        measures = {}
        for arm, answer in answers.items():
            if arm != FULL:
                replayed = self.engine.replay(self._replayed(arm, answer), continuation)
                measures[arm] = divergence(full.logprobs, replayed.logprobs) | self._attended(arm, full, answer)
        return measures

    def _replayed(self, arm: Arm, answer: _Answer) -> GenerationRequest:
        return self.cut(answer.spans) if arm.kind == "renumbered" else self.request(arm)

    def _attended(self, arm: Arm, full: Replay, answer: _Answer) -> dict[str, float]:
        """Compare the attention of the target's own answer with the selection: an oracle without labels (CLAA, arXiv
        2602.16054).

        Returns:
            `mass`, the share of the attention on selectable tokens that falls on kept ones, and for arms that ask the
            draft `agreement`, the rank correlation of both over published chunks.
        """
        if full.attention is None:
            return {}
        open_to_choice = ~self.mask([(start, end) for start, end, _ in self.inspection().forced_ranges])
        total = float(full.attention[open_to_choice].sum())
        held = float(full.attention[open_to_choice & self.mask(answer.spans)].sum())
        if total <= 0:
            return {}
        mass = {"mass": held / total}
        if not arm.asks_draft:
            return mass
        starts = np.arange(0, open_to_choice.size, CHUNK)
        sums = [
            np.add.reduceat(np.where(open_to_choice, scores, 0), starts)
            for scores in (self.inspection(arm.rule).importance, full.attention)
        ]
        some = np.logical_or.reduceat(open_to_choice, starts)
        return mass | {"agreement": rank_agreement(sums[0][some], sums[1][some])}


def _gather(engine: Engine, requests: Mapping[Arm, GenerationRequest]) -> dict[Arm, _Answer]:
    """Run all requests at the same time. Their answers are decoded in one batch."""
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
                yield arm, _Answer(tuple(tokens[arm]), event.report)
            case Failed():
                raise NotMeasuredError(f"arm {arm.name} failed: {event.error}") from event.error
