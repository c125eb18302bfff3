"""No short turn waits for its first token until the draft has read what it lags behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    ModelPair,
    PromptSpan,
    SelectionConfig,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    TokenEvent,
)
from mlx_specprefill.adapters.capture import HeadCapture
from mlx_specprefill.cache.feeding import feed
from mlx_specprefill.engine.reading import scoring
from mlx_specprefill.engine.thread import loop
from mlx_specprefill.pair import with_heads
from mlx_specprefill.request import SHARED
from mlx_specprefill.selection.heads import DraftHeads, Head
from tests.engine.test_mapped_draft import TEXT, behind, permuted, tokens_of
from tests.engine.test_mapped_draft import pair as mapped_pair
from tests.engine.test_sessions import Meter
from tests.support.tiny import generated, random_prompt, tiny_pair
from tests.support.waiting import eventually

HEADS = DraftHeads((Head(1, 3, 0.5), Head(0, 0, 0.25)), 2, 3, {"copy": 1.0})
CONFIG = EngineConfig(
    policy=SpecPrefillPolicy(threshold=300, keep_pct=Fraction(1, 5), densify=False),
    prefill_step=128,
    prefix_cache_bytes=64 << 20,
)
PAUSING = replace(CONFIG, policy=replace(CONFIG.policy, densify=True))
AUTO, OFF = SpecPrefillOptions(return_spans=True), SpecPrefillOptions(False)
ANSWER = 2
ASKED, ASKS = 26, "What is the code for Anna?"
SESSION = [("user", 900), ("tool", 200), ("tool", 150), ("user", ASKED), ("tool", 100), ("user", ASKED), ("tool", 500)]
SESSION += [("user", ASKED)]
DRAFT = 0.35  # of the target's time per token


class Dialogue:
    """A conversation of messages with random text.

    Attributes:
        on_sent: called when a request has been submitted; `on_event`: with each event, on the engine's thread.
    """

    def __init__(self) -> None:
        self.prompt: tuple[int, ...] = ()
        self.spans: tuple[PromptSpan, ...] = ()
        self.on_sent: Callable[[], object] = lambda: None
        self.on_event: Callable[[Event], object] = lambda _: None

    def ask(self, engine: Engine, kind: str, text: Sequence[int], options: SpecPrefillOptions = AUTO) -> Finished:
        start, self.prompt = len(self.prompt), (*self.prompt, *text)
        self._say(kind, start)
        request = GenerationRequest(self.prompt, ANSWER, specprefill=options, spans=self.spans)
        events, ended = list[Event](), threading.Event()

        def note(event: Event) -> None:
            self.on_event(event)
            events.append(event)
            if isinstance(event, Finished | Failed):
                ended.set()

        engine.submit(request, note)
        self.on_sent()
        assert ended.wait(60)
        answer, last = generated(events)
        start, self.prompt = len(self.prompt), (*self.prompt, *answer)
        self._say("assistant", start)
        return last

    def _say(self, kind: str, start: int) -> None:
        self.spans += (PromptSpan(kind, start, start, len(self.prompt), len(self.prompt)),)


def pause(engine: Engine) -> None:
    """Wait until there is nothing more to read."""
    assert eventually(lambda: not len(engine.densifier.turns))


def waits(pair: ModelPair, meter: Meter, config: EngineConfig, options: SpecPrefillOptions) -> list[float]:
    """Return the tokens in front of each turn's first one, without recalled ones, a draft's as parts of a target's."""
    talk, found = Dialogue(), list[float]()
    with Engine(pair, config) as engine:
        for kind, tokens in SESSION:
            if config is PAUSING:
                pause(engine)
            meter.take()
            text, taken = random_prompt(tokens, len(found)), list[tuple[int, int]]()
            talk.on_event = lambda event: taken.append(meter.take()) if isinstance(event, TokenEvent) else None  # noqa: B023
            recalled = talk.ask(engine, kind, text, options).report.recalled_tokens
            target, draft = taken[0]
            found.append(target - recalled + DRAFT * draft)
        assert not engine.stats().fallbacks
    return found


@pytest.mark.parametrize("config", [CONFIG, pytest.param(PAUSING, marks=pytest.mark.extended)], ids=["busy", "pausing"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gpt_oss", "nemotron_h"])
def test_no_turn_waits_for_what_the_draft_has_not_read(
    family: str, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No turn is dearer than one and a half times the same in full, and the session is cheaper."""
    monkeypatch.setattr(loop, "_QUIET_S", 0.0)
    pair = with_heads(tiny_pair(family, "llama"), HEADS)
    meter = Meter(pair, monkeypatch)
    ours, full = (waits(pair, meter, config, options) for options in (AUTO, OFF))
    assert max(mine / its for mine, its in zip(ours, full, strict=True)) <= 1.5
    assert sum(ours) <= 0.9 * sum(full)


def wants(patch: pytest.MonkeyPatch, *ranges: range) -> None:
    """From now on the draft's heads look at these tokens, if they see them."""

    def looks_at(capture: HeadCapture, call: int, head: int, *_: object) -> None:
        row = np.full(capture.prompt_len, 1e-6, dtype=np.float32)
        for wanted in ranges:
            row[wanted.start : wanted.stop] = 1.0
        capture.attention[call, head] = mx.array(row)

    patch.setattr(HeadCapture, "_keep", looks_at)


def kept_of(last: Finished) -> set[int]:
    return {index for start, end in last.report.kept_spans or () for index in range(start, end)}


def test_a_lagging_draft_still_finds_what_a_question_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks behind what it has read, and reads nothing else."""
    pair, talk = with_heads(tiny_pair(), HEADS), Dialogue()
    wants(monkeypatch, range(320, 352))
    with Engine(pair, CONFIG) as engine:
        before = kept_of(talk.ask(engine, "user", random_prompt(900)))
        talk.ask(engine, "tool", random_prompt(250, 1))
        wanted = set(range(640, 672))
        assert not wanted <= before
        wants(monkeypatch, range(640, 672))
        last = talk.ask(engine, "user", random_prompt(ASKED, 2))
        assert last.report.draft_tokens == 0
        assert wanted <= kept_of(last)
        assert last.report.recalled_tokens < 256


def test_nothing_is_asked_once_all_is_recalled(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, talk = with_heads(tiny_pair(), HEADS), Dialogue()
    config = replace(CONFIG, policy=replace(CONFIG.policy, keep_pct=Fraction(9, 10)))
    meter, read = Meter(pair, monkeypatch), []
    wants(monkeypatch, range(64, 320))
    with Engine(pair, config) as engine:
        kept = kept_of(talk.ask(engine, "user", random_prompt(400)))
        missing = set(range(400)) - kept
        assert missing
        wants(monkeypatch, *(range(index, index + 1) for index in missing))
        for number in (1, 2):
            meter.take()
            last = talk.ask(engine, "user", random_prompt(ASKED, number))
            read.append(meter.take()[1])
            assert last.report.kept_tokens == last.report.prompt_tokens
    assert read[0] > 0
    assert read[1] == 0


def test_a_mapped_draft_that_lags_finds_the_same() -> None:
    """The target's own weights behind another numbering of its vocabulary, and behind the same."""
    tokenizer, ids = permuted()
    config = replace(CONFIG, selection=SelectionConfig(stands_out=0.0))
    found = []
    for pair in (mapped_pair(), mapped_pair(behind(ids), tokenizer)):
        talk, reports = Dialogue(), []
        with Engine(pair, config) as engine:
            for kind, text in (("user", 4 * TEXT), ("tool", TEXT[:200]), ("user", ASKS)):
                report = talk.ask(engine, kind, tokens_of(text).tolist()).report
                reports.append((report.kept_spans, report.recalled_tokens, report.draft_tokens))
        found.append(reports)
    assert found[0] == found[1]
    (_, _, first), (_, _, tool), (_, recalled, last) = found[0]
    assert first > 300
    assert tool == last == 0
    assert recalled > 0


def test_what_the_draft_read_in_a_pause_serves_the_turn_that_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause ends in the middle of its reading: the next turn's draft goes on from there."""
    pair, talk = with_heads(tiny_pair(), HEADS), Dialogue()
    monkeypatch.setattr(loop, "_QUIET_S", 0.0)
    begun, sent, read = threading.Event(), threading.Event(), list[int]()

    def interrupted(*parts: Any) -> Generator[Any, None, None]:
        for done, logits in feed(*parts):
            read.append(done)
            if len(read) == 2:
                begun.set()
                assert sent.wait(60)
            yield done, logits

    with Engine(pair, PAUSING) as engine:
        talk.ask(engine, "user", random_prompt(900))
        pause(engine)
        known = len(talk.prompt)
        monkeypatch.setattr(scoring, "feed", interrupted)
        talk.ask(engine, "tool", random_prompt(290, 1))
        assert begun.wait(60)
        talk.on_sent = sent.set
        last = talk.ask(engine, "tool", random_prompt(500, 2))
        assert last.report.mode == "sparse"
        assert 0 < last.report.draft_tokens <= len(talk.prompt) - known - read[1]
        pause(engine)
        assert engine.caches.draft_covers(talk.prompt, SHARED) == len(talk.prompt)


def test_a_draft_reads_in_pauses_no_more_than_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_QUIET_S", 0.0)
    pair, found = with_heads(tiny_pair(), HEADS), []
    for context in (500, 499):
        talk = Dialogue()
        with Engine(replace(pair, draft_context=context), PAUSING) as engine:
            talk.ask(engine, "tool", random_prompt(500 - ANSWER))
            pause(engine)
            found.append(engine.caches.draft_covers(talk.prompt, SHARED))
    assert found == [500, 500 - ANSWER]
