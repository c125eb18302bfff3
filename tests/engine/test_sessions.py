"""Agent sessions: what is chosen stays so, a session only grows, and what was dropped can be recalled."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specprefill import (
    CacheLabel,
    Engine,
    EngineConfig,
    Event,
    Finished,
    GenerationRequest,
    ModelPair,
    PromptSpan,
    SelectionConfig,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    TokenEvent,
    load_pair,
)
from mlx_specprefill.adapters.capture import QueryCapture
from mlx_specprefill.engine.reading.costs import CostModel
from mlx_specprefill.selection.heads import DraftHeads, Head
from tests.engine.test_composition import masked_greedy
from tests.engine.test_own_layers import own_pair
from tests.support.precision import assert_close
from tests.support.tiny import FAMILIES, generated, greedy, random_prompt, tiny_pair
from tests.support.waiting import eventually

DEMO = Path(__file__).parents[2] / "models" / "demo"
POLICY = SpecPrefillPolicy(threshold=300, keep_pct=Fraction(3, 10), densify=False)
CONFIG = EngineConfig(policy=POLICY, prefill_step=128, prefix_cache_bytes=64 << 20)
AUTO, OFF = SpecPrefillOptions(return_spans=True), SpecPrefillOptions(False, return_spans=True)
TURNS, FIRST, ANSWER = 7, 900, 6


class Meter:
    """Counts the tokens that go through each model of a pair."""

    def __init__(self, pair: ModelPair, patch: pytest.MonkeyPatch) -> None:
        self.target = self.draft = 0
        for name in ("target", "draft"):
            self._watch(type(getattr(pair, name)), getattr(pair, name), name, patch)

    def _watch(self, kind: type, model: Any, name: str, patch: pytest.MonkeyPatch) -> None:
        inner: Callable[..., Any] = kind.__call__

        def counted(this: Any, tokens: mx.array, *args: Any, **kwargs: Any) -> Any:
            if this is model:
                setattr(self, name, getattr(self, name) + int(tokens.size))
            return inner(this, tokens, *args, **kwargs)

        patch.setattr(kind, "__call__", counted)

    def take(self) -> tuple[int, int]:
        counts = self.target, self.draft
        self.target = self.draft = 0
        return counts


def tool_result(turn: int) -> tuple[int, ...]:
    return random_prompt(40, 100 + turn)


def seven_turns(engine: Engine, meter: Meter, options: SpecPrefillOptions) -> list[tuple[int, int, Finished]]:
    """(tokens fed to the target, to the draft, the end) of each turn; every turn appends what came before it."""
    prompt, turns = random_prompt(FIRST), []
    for turn in range(TURNS):
        meter.take()
        answer, last = generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=options)))
        turns.append((*meter.take(), last))
        prompt = (*prompt, *answer, *tool_result(turn))
    return turns


@pytest.mark.parametrize("family", FAMILIES)
def test_later_turns_feed_no_more_than_a_dense_session_and_the_look_ahead(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven turns without a pause: sparse pays for what is new, as dense does, and for the draft's look-ahead."""
    rows, asking = CONFIG.scoring.rows, CONFIG.scoring.question_rows[1]
    pair = tiny_pair(family)
    meter = Meter(pair, monkeypatch)
    with Engine(pair, CONFIG) as engine:
        sparse = seven_turns(engine, meter, AUTO)
    with Engine(pair, CONFIG) as engine:
        dense = seven_turns(engine, meter, OFF)
    assert [last.report.mode for _, _, last in sparse] == ["sparse"] * TURNS
    assert sparse[0][0] < dense[0][0]
    for (fed, scored, last), (cached, unscored, _) in zip(sparse[1:], dense[1:], strict=True):
        report = last.report
        assert fed - ANSWER == report.kept_tokens - report.cached_tokens
        assert fed <= cached + report.recalled_tokens
        assert report.recalled_tokens <= 256
        assert unscored == 0
        assert scored <= max(len(tool_result(0)) + ANSWER + 1, asking) + rows
        assert 0 < report.draft_tokens <= scored


def kept_of(last: Any) -> set[int]:
    return {index for start, end in last.report.kept_spans for index in range(start, end)}


def wants(patch: pytest.MonkeyPatch, *chunks: int) -> None:
    """From now on the draft looks at these chunks."""

    def looks_at(self: Any, *_: Any) -> None:
        row = np.full(self.prompt_len, 1e-6, dtype=np.float32)
        for chunk in chunks:
            row[32 * chunk : 32 * chunk + 32] = 1.0
        self._best = mx.array(row)
        self._count += 1

    patch.setattr(QueryCapture, "_add", looks_at)


@pytest.mark.extended
@pytest.mark.parametrize("family", FAMILIES)
def test_a_later_question_recalls_what_it_wants_and_nothing_is_read_again(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, on every kind of layer. Fed is what was recalled and what is new; what was kept stays."""
    pair, prompt = tiny_pair(family, "llama"), random_prompt(FIRST)
    meter, turns = Meter(pair, monkeypatch), np.zeros(FIRST, dtype=int)
    wants(monkeypatch, 12)
    with Engine(pair, CONFIG) as engine:
        answer, last = generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=AUTO)))
        for turn, missing in enumerate(([20], [7, 18]), 1):
            before, end = kept_of(last), len(prompt) + ANSWER
            wants(monkeypatch, 12, 20, *missing)
            prompt = (*prompt, *answer, *tool_result(turn))
            meter.take()
            answer, last = generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=AUTO)))
            fed, _ = meter.take()
            late = {i for i in kept_of(last) - before if i < end - ANSWER}
            asked = {32 * chunk + i for chunk in missing for i in range(32)}
            assert asked <= before | late
            assert last.report.recalled_tokens == len(late)
            assert 0 < len(asked - before) <= len(late) <= 256
            assert kept_of(last) == before | late | set(range(end - ANSWER, len(prompt)))
            assert fed == len(late) + len(prompt) - end + ANSWER
            turns = np.concatenate([turns, np.full(end - turns.size, turn - 1), np.full(len(prompt) - end, turn)])
            turns[sorted(late)] = turn
            if family in ("llama", "qwen3"):
                assert answer == masked_greedy(pair.target, prompt, sorted(kept_of(last)), ANSWER, turns)
    assert not engine.stats().fallbacks


@pytest.mark.parametrize(("stands_out", "recalls"), [(1e9, False), (1.0, True)])
def test_how_far_a_dropped_token_must_stand_out_is_configured(stands_out: float, recalls: bool) -> None:
    """Two turns with other questions."""
    pair = dataclasses.replace(tiny_pair(), heads=DraftHeads((Head(1, 0, 1.0),), 2, 2, {}))
    config = dataclasses.replace(CONFIG, selection=SelectionConfig(stands_out=stands_out))
    with Engine(pair, config) as engine:
        prompt = random_prompt(FIRST)
        answer, _ = generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=AUTO)))
        following = GenerationRequest((*prompt, *answer, *tool_result(0)), ANSWER, specprefill=AUTO)
        _, last = generated(engine.generate(following))
    assert (last.report.recalled_tokens > 0) == recalls
    assert last.report.recalled_tokens <= 256


@pytest.mark.extended
def test_no_more_is_recalled_than_a_part_of_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of what would be kept of the old text, where that is more than 256 tokens."""
    pair, prompt = tiny_pair(), random_prompt(3700)
    wants(monkeypatch, *range(10, 30))
    with Engine(pair, CONFIG) as engine:
        answer, first = generated(engine.generate(GenerationRequest(prompt, 2, specprefill=AUTO)))
        wants(monkeypatch, *range(60, 80))
        following = GenerationRequest((*prompt, *answer, *tool_result(0)), 2, specprefill=AUTO)
        _, last = generated(engine.generate(following))
    assert 256 < last.report.recalled_tokens <= 0.25 * first.report.kept_tokens + 16


@pytest.mark.parametrize("kind", ["tool", "user"])
def test_tool_results_recall_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones are read without the draft; a user's message may want something."""
    pair, prompt = tiny_pair(), random_prompt(FIRST)
    meter = Meter(pair, monkeypatch)
    wants(monkeypatch, 12)
    spans = [PromptSpan("user", 0, 0, FIRST, FIRST)]
    with Engine(pair, CONFIG) as engine:
        answer, _ = generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=AUTO, spans=tuple(spans))))
        wants(monkeypatch, 20)
        end = FIRST + ANSWER
        prompt = (*prompt, *answer, *tool_result(0))
        spans += [
            PromptSpan("assistant", FIRST, FIRST, end, end),
            PromptSpan(kind, end, end, len(prompt), len(prompt)),
        ]
        meter.take()
        _, last = generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=AUTO, spans=tuple(spans))))
    fed, scored = meter.take()
    assert (scored > 0) == (last.report.recalled_tokens > 0) == (kind == "user")
    assert fed == 1 + 40 + last.report.recalled_tokens + ANSWER - 1


class Talk:
    """A conversation whose client adds to it, repeats a turn, says something else instead, or goes back."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.prompt = random_prompt(int(self.random.integers(400, 1200)), seed)
        self.turns: list[tuple[int, ...]] = []

    def next(self, answer: Sequence[int]) -> tuple[int, ...]:
        self.turns.append(self.prompt)
        what = self.random.choice(["short", "long", "again", "edited", "back"], p=[0.4, 0.25, 0.1, 0.15, 0.1])
        if what == "again":
            return self.prompt
        if what == "edited":
            kept = len(self.prompt) - int(self.random.integers(1, 30))
            self.prompt = (*self.prompt[:kept], *self._text(30))
            return self.prompt
        if what == "back":
            self.prompt = self.turns[int(self.random.integers(len(self.turns)))]
            answer = self._text(5)
        self.prompt = (*self.prompt, *answer, *self._text(600 if what == "long" else 40))
        return self.prompt

    def _text(self, most: int) -> tuple[int, ...]:
        return random_prompt(int(self.random.integers(1, most)), int(self.random.integers(1 << 30)))


@pytest.mark.parametrize(
    ("family", "own_layers"),
    [
        ("llama", False),
        *(pytest.param(family, family == "llama", marks=pytest.mark.extended) for family in FAMILIES),
        *(pytest.param(family, True, marks=pytest.mark.nightly) for family in FAMILIES if family != "llama"),
    ],
)
def test_no_turn_reads_more_than_the_same_server_in_full(
    family: str, own_layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random conversations. What is recalled comes on top, and is little."""
    pair = own_pair(family) if own_layers else tiny_pair(family)
    meter = Meter(pair, monkeypatch)
    for seed in range(3):
        talk, read = Talk(seed), []
        prompts = []
        with Engine(pair, CONFIG) as engine:
            prompt = talk.prompt
            for _ in range(8):
                prompts.append(prompt)
                meter.take()
                answer, last = generated(engine.generate(GenerationRequest(prompt, 3, specprefill=AUTO)))
                report, fed = last.report, meter.take()[0]
                read.append((fed, report.recalled_tokens, answer))
                assert report.recalled_tokens <= max(256, report.prompt_tokens * 0.3 / 4 + 16)
                prompt = talk.next(answer)
            assert not engine.stats().fallbacks
        with Engine(pair, CONFIG) as engine:
            for prompt, (fed, recalled, answer) in zip(prompts, read, strict=True):
                meter.take()
                full, _ = generated(engine.generate(GenerationRequest(prompt, 3, specprefill=OFF)))
                dense = meter.take()[0]
                assert fed <= dense + recalled, (family, seed, len(prompt))
                if full != answer:  # the next prompt holds the other answer: let this server know it too
                    generated(engine.generate(GenerationRequest((*prompt, *answer), 1, specprefill=OFF)))


@pytest.mark.extended
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_retry_starts_at_once_after_a_restart_too(
    family: str, restarted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pair, prompt = tiny_pair(family), random_prompt(FIRST)
    config = dataclasses.replace(CONFIG, prefix_cache_dir=tmp_path) if restarted else CONFIG
    meter = Meter(pair, monkeypatch)
    forced = SpecPrefillOptions(True, return_spans=True)
    for how in (AUTO, forced):
        engine = Engine(pair, config)
        engine.start()
        answer, first = generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=how)))
        if restarted:
            engine.close()
            engine = Engine(pair, config)
            engine.start()
        meter.take()
        again, last = generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=how)))
        fed, _ = meter.take()
        engine.close()
        assert again == answer
        assert fed == 1 + ANSWER
        assert kept_of(last) == kept_of(first)


@pytest.mark.extended
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_changed_prompt_goes_on_from_what_is_left(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client writes the end of the last turn anew: nothing before it is read again."""
    pair = tiny_pair(family, "llama")
    meter = Meter(pair, monkeypatch)
    wants(monkeypatch, 12)
    prompt = random_prompt(FIRST)
    changed = (*prompt[:-20], *random_prompt(30, 8))
    with Engine(pair, CONFIG) as engine:
        _, first = generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=AUTO)))
        meter.take()
        tokens, last = generated(engine.generate(GenerationRequest(changed, ANSWER, specprefill=AUTO)))
        fed, _ = meter.take()
    assert kept_of(last) == {i for i in kept_of(first) if i < FIRST - 20} | set(range(FIRST - 20, FIRST + 10))
    assert fed == 30 + ANSWER
    assert tokens == masked_greedy(pair.target, changed, sorted(kept_of(last)), ANSWER)


def test_nothing_sparse_answers_a_dense_request_or_another_ones() -> None:
    """Another key, another share, and a request that wants all of its prompt read."""
    pair, prompt = tiny_pair(), random_prompt(FIRST)
    longer = (*prompt, *tool_result(0))
    with Engine(pair, CONFIG) as engine:
        generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=AUTO)))
        tokens, last = generated(engine.generate(GenerationRequest(longer, ANSWER, specprefill=OFF)))
        assert last.report.mode == "full"
        assert tokens == greedy(pair.target, longer, ANSWER)
    half = SpecPrefillOptions(keep_pct=Fraction(1, 2), return_spans=True)
    for request in (
        GenerationRequest(longer, ANSWER, specprefill=half),
        GenerationRequest(longer, ANSWER, specprefill=AUTO, label=CacheLabel("other")),
    ):
        with Engine(pair, CONFIG) as engine:
            alone = generated(engine.generate(request))
        with Engine(pair, CONFIG) as engine:
            generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=AUTO)))
            after = generated(engine.generate(request))
        assert after[0] == alone[0]
        assert kept_of(after[1]) == kept_of(alone[1])


@pytest.mark.parametrize("first", [True, None])
@pytest.mark.parametrize("second", [True, None])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_conversation_goes_on_whether_a_turn_is_forced_or_not(
    family: str, first: bool | None, second: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, prompt = tiny_pair(family), random_prompt(FIRST)
    meter = Meter(pair, monkeypatch)
    spans = (PromptSpan("user", 0, 0, FIRST, FIRST),)
    with Engine(pair, CONFIG) as engine:
        answer, _ = generated(
            engine.generate(GenerationRequest(prompt, ANSWER, specprefill=SpecPrefillOptions(first), spans=spans))
        )
        longer = (*prompt, *answer, *random_prompt(400, 5))
        end = FIRST + ANSWER
        said = (
            *spans,
            PromptSpan("assistant", FIRST, FIRST, end, end),
            PromptSpan("user", end, end, len(longer), len(longer)),
        )
        meter.take()
        how = SpecPrefillOptions(second)
        _, last = generated(engine.generate(GenerationRequest(longer, ANSWER, specprefill=how, spans=said)))
        assert last.report.mode == "sparse"
        assert last.report.cached_tokens > 200
        assert meter.take()[0] <= 1 + 400 + last.report.recalled_tokens + ANSWER


def test_own_scores_and_forced_requests_do_not_depend_on_a_session() -> None:
    """The same prompt again, with scores of the caller's, and forced: what is kept is what the request asks for."""
    prompt = random_prompt(FIRST)
    importance = np.linspace(1, 2, FIRST, dtype=np.float32)
    own = SpecPrefillOptions(True, return_spans=True, importance=importance)
    forced = SpecPrefillOptions(True, return_spans=True)
    with Engine(tiny_pair("llama"), CONFIG) as engine:
        alone = [
            kept_of(generated(engine.generate(GenerationRequest(prompt, 2, specprefill=how)))[1])
            for how in (own, forced)
        ]
        generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=AUTO)))
        for how, expected in zip((own, forced), alone, strict=True):
            _, last = generated(engine.generate(GenerationRequest(prompt, 2, specprefill=how)))
            assert kept_of(last) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_the_draft_reads_in_idle_time_what_the_target_has_read(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that is too short to choose from, then a long one: the draft reads what is new, and the target too."""
    pair, prompt = tiny_pair(family), random_prompt(250)
    config = dataclasses.replace(CONFIG, policy=dataclasses.replace(POLICY, densify=True))
    meter = Meter(pair, monkeypatch)
    with Engine(pair, config) as engine:
        answer, last = generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=AUTO)))
        assert last.report.mode == "full"
        assert eventually(lambda: meter.draft >= 250)
        longer = (*prompt, *answer, *random_prompt(600, 3))
        assert eventually(lambda: not engine.loop.jobs)
        meter.take()
        _, last = generated(engine.generate(GenerationRequest(longer, ANSWER, specprefill=AUTO)))
    assert last.report.mode == "sparse"
    assert last.report.draft_tokens <= 600 + 1
    assert last.report.cached_tokens >= 250


def test_another_models_folder_is_not_used(tmp_path: Path) -> None:
    prompt, config = random_prompt(300), dataclasses.replace(CONFIG, prefix_cache_dir=tmp_path)
    with Engine(tiny_pair("llama"), config) as engine:
        generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=OFF)))
    with Engine(tiny_pair("qwen3"), config) as engine:
        _, last = generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=OFF)))
    assert last.report.cached_tokens == 0


# --- two needles, one of them dropped: the bundled pair --------------------------------------------------------------

NAMES = "Anna Peter Maria Thomas Laura Daniel Sophie Martin Julia Simon Clara Robert".split()
WORDS = """river stone market winter letter garden window bridge captain morning silver forest teacher engine harbor
village paper cotton ladder mirror pocket summer tunnel valley writer yellow basket candle doctor eagle""".split()


def haystack(seed: int, words: int) -> tuple[str, dict[str, str]]:
    """Sentences with one code per name, evenly spread; the codes."""
    rng = np.random.default_rng(seed)
    sentences = ["The " + " ".join(rng.choice(WORDS, 7)) + "." for _ in range(words // 8)]
    codes = {name: str(rng.integers(100_000, 1_000_000)) for name in NAMES}
    for place, (name, code) in enumerate(codes.items()):
        sentences.insert((2 * place + 1) * len(sentences) // (2 * len(codes)), f"The secret code for {name} is {code}.")
    return " ".join(sentences), codes


class Chat:
    """A conversation with an engine in the demo pair's chat format."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.messages: list[dict[str, str]] = []

    def ask(self, text: str) -> tuple[str, Finished]:
        self.messages.append({"role": "user", "content": text})
        pair = self.engine.pair
        prompt = tuple(pair.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True))
        request = GenerationRequest(
            prompt, 24, specprefill=AUTO, spans=self._spans(prompt), stop_token_ids=pair.eos_token_ids
        )
        events = list(self.engine.generate(request))
        tokens = [e.token for e in events if isinstance(e, TokenEvent) and e.token not in pair.eos_token_ids]
        answer = pair.tokenizer.decode(tokens)
        self.messages.append({"role": "assistant", "content": answer})
        assert isinstance(events[-1], Finished)
        return answer, events[-1]

    def _spans(self, prompt: tuple[int, ...]) -> tuple[PromptSpan, ...]:
        """Messages as the template bounds them: it says <|im_start|>role newline ... <|im_end|> newline."""
        start, end = (self.engine.pair.tokenizer.convert_tokens_to_ids(f"<|im_{name}|>") for name in ("start", "end"))
        starts = [i for i, token in enumerate(prompt) if token == start]
        ends = [i for i, token in enumerate(prompt) if token == end]
        kinds = [message["role"] for message in self.messages]
        return tuple(PromptSpan(kind, a, a + 3, z, z + 2) for kind, a, z in zip(kinds, starts, ends, strict=False))


def index_of(pair: ModelPair, prompt_text: Sequence[int], code: str) -> set[int]:
    """Prompt indices of a code's digits."""
    text, where = pair.tokenizer.decode(list(prompt_text)), set()
    at, reached = text.index(code), 0
    for index, token in enumerate(prompt_text):
        piece = len(pair.tokenizer.decode([token]))
        if reached < at + len(code) and reached + piece > at:
            where.add(index)
        reached += piece
    return where


@pytest.mark.timeout(900)  # eight turns of the bundled pair, and as often a prompt made dense
@pytest.mark.parametrize("idle", [True, False], ids=["densified", "re-scored"])
@pytest.mark.extended
def test_the_second_needle_is_found_though_the_first_turn_dropped_it(idle: bool) -> None:
    """Turn 1 asks for A and drops B. Turn 2 asks for B: answered from the dense copy, or by scoring again."""
    pair = load_pair(DEMO / "target", DEMO / "draft")
    policy = SpecPrefillPolicy(threshold=512, keep_pct=Fraction(1, 5), densify=idle)
    right = swaps = 0
    with Engine(pair, EngineConfig(policy=policy)) as engine:
        for seed in range(4):
            chat, (text, codes) = Chat(engine), haystack(seed, 700)
            done = engine.stats().densified
            first, end = chat.ask(f"{text}\n\nWhat is the secret code for {NAMES[2]}?")
            assert end.report.mode == "sparse"
            dropped = next((name for name in NAMES if not in_kept(pair, chat, end, codes[name])), None)
            if idle:
                assert eventually(lambda done=done: engine.stats().densified > done, 200)
            if dropped is None or codes[NAMES[2]] not in first:
                continue
            second, end = chat.ask(f"What is the secret code for {dropped}?")
            assert end.report.mode == ("full" if idle else "sparse")
            assert idle or in_kept(pair, chat, end, codes[dropped])
            swaps += 1
            right += codes[dropped] in second
    assert swaps >= 2
    assert right == swaps


def in_kept(pair: ModelPair, chat: Chat, end: Finished, code: str) -> bool:
    """Return whether the target has read all digits of a code in the first message."""
    prompt = pair.tokenizer.apply_chat_template(chat.messages[:1], add_generation_prompt=True)
    return index_of(pair, prompt, code) <= kept_of(end)


# --- several answers to one prompt -----------------------------------------------------------------------------------


def answers_together(engine: Engine, request: GenerationRequest, copies: int) -> list[list[TokenEvent | Finished]]:
    """The events of a first answer, and of further ones that are asked for when its first token comes."""
    events = [list[TokenEvent | Finished]() for _ in range(1 + copies)]
    ended = threading.Semaphore(0)

    def note(number: int, event: Event) -> None:
        if isinstance(event, TokenEvent | Finished):
            events[number].append(event)
        if isinstance(event, Finished):
            ended.release()
        if number == 0 and len(events[0]) == 1:  # on the thread that would have to read them
            for copy in range(copies):
                engine.submit(request, partial(note, 1 + copy))

    engine.submit(request, partial(note, 0))
    assert all(ended.acquire(timeout=120) for _ in events)
    return events


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["draft", "own layers"])
@pytest.mark.parametrize("enabled", [None, True])
def test_further_answers_to_a_sparse_prompt_read_its_last_token(family: str, how: str, enabled: bool | None) -> None:
    """While the first one is written. They have the same probabilities, and the draft chooses nothing more for them."""
    pair = tiny_pair(family) if how == "draft" else own_pair(family)
    config = dataclasses.replace(CONFIG, selection=SelectionConfig(stands_out=1.0))
    options = SpecPrefillOptions(enabled, return_spans=True)
    with Engine(pair, config) as engine:
        asked = GenerationRequest(random_prompt(FIRST), 30, specprefill=options, logprobs=0)
        first, *others = answers_together(engine, asked, 3)
        assert engine.stats().fallbacks == {}
    *tokens, last = first
    assert last.report.mode == "sparse"
    assert 1 < last.report.kept_tokens < FIRST / 2
    for *its, end in others:
        assert end.report.kept_tokens - end.report.cached_tokens == 1
        assert kept_of(end) == kept_of(last)
        assert [event.token for event in its] == [event.token for event in tokens]
        assert_close([event.logprob for event in its], [event.logprob for event in tokens], atol=1e-4)


@pytest.mark.parametrize("new", [40, 500])  # read whole behind the first turn, and in part
def test_full_reading_is_predicted_with_what_is_cached_for_it(new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse turn's tokens are no beginning for full reading, which would read the text of that turn too."""
    monkeypatch.setattr(CostModel, "observe", lambda *_: None)  # costs stay what they are before the first forward
    prompt = random_prompt(FIRST)
    predicted, cached = [], []
    for options in (AUTO, OFF):
        with Engine(tiny_pair(), CONFIG) as engine:
            answer, _ = generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=AUTO)))
            following = GenerationRequest((*prompt, *answer, *random_prompt(new, 9)), 1, specprefill=options)
            _, last = generated(engine.generate(following))
            assert last.report.predicted is not None
            predicted.append(last.report.predicted)
            cached.append(last.report.cached_tokens)
            nothing = engine.predict(len(following.prompt), len(following.prompt))
    behind_turn, in_full = predicted
    assert cached[0] > cached[1]
    assert behind_turn.full_ms == in_full.full_ms
    assert 0.8 * nothing.full_ms < in_full.full_ms <= nothing.full_ms
    assert behind_turn.sparse_ms < behind_turn.full_ms
