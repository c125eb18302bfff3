"""An engine in this process as the model under test.

Every arm goes through the engine's one path of plan, selection and prefill.

Arms differ in the scores that a request brings along. Nothing here knows arrays of any model: distributions come from
`Engine.replay`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import queue
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    PrefillReport,
    SpecPrefillError,
    SpecPrefillPolicy,
    TokenEvent,
    as_token_ids,
)
from mlx_specprefill_server.prompt.builder import Prompt, PromptBuilder
from mlx_specprefill_server.prompt.conversation import conversation

from .arms import SERVED_KINDS, Arm
from .errors import NotMeasuredError
from .forced import Forced, check_mode, forced_replies
from .model_under_test import Reply
from .prompted import OWNER, Prompted, Span
from .tasks import Item, Known

CACHE_BYTES = 4 << 30  # of one item's arms; they are kept apart by label and forgotten after the item


def examination() -> EngineConfig:
    """Return a configuration without idle work, which one answer could leave behind for the next one."""
    return EngineConfig(policy=SpecPrefillPolicy(densify=False), prefix_cache_bytes=CACHE_BYTES)


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
    def described(self) -> Mapping[str, str]:
        pair = self._engine.pair
        heads = "none" if pair.heads is None else _digest(json.dumps(pair.heads.to_dict(), sort_keys=True))
        return {"target": str(pair.target_id), "draft": str(pair.draft_id or "none"), "heads": heads}

    def count(self, text: str) -> int:
        return len(self._encode(text))

    def ask(self, item: Item, arms: Sequence[Arm], answer_tokens: int, seed: int) -> dict[Arm, Reply]:
        for arm in arms:
            if arm.kind in SERVED_KINDS:
                raise NotMeasuredError(f"arm {arm.kind} needs a server: --url URL")
        applicable = [arm for arm in arms if arm.kind != "oracle" or item.gold or item.mentions]
        try:
            self._engine.drop_cached(owner=OWNER)  # of the item before
            if item.known is not None:
                return self._force(item, item.known, applicable, seed)
            return self._generate(item, applicable, answer_tokens, seed)
        except SpecPrefillError as error:
            raise NotMeasuredError(str(error)) from error

    def _force(self, item: Item, known: Known, arms: Sequence[Arm], seed: int) -> dict[Arm, Reply]:
        mentions: tuple[tuple[Span, ...], ...] = ()
        if known.raw:
            prompt, gold, forced = self._continued(item, known)
        else:
            prompt, gold, mentions = self._rendered(item)
            forced = Forced(*_behind(self._encode(known.opening), self._encode(known.opening + known.answer)))
        return forced_replies(Prompted(self._engine, prompt, gold, 1, seed, mentions), forced, arms, self._decode)

    def _generate(self, item: Item, arms: Sequence[Arm], answer_tokens: int, seed: int) -> dict[Arm, Reply]:
        prompted = Prompted(self._engine, *self._rendered(item)[:2], answer_tokens, seed)
        answers = _gather(self._engine, {arm: prompted.request(arm) for arm in arms})
        for arm, answer in answers.items():
            check_mode(arm, answer.report)
        return {arm: self._reply(answers[arm], prompted.found(arm, answers[arm].spans)) for arm in arms}

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
