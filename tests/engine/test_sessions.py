"""Agent sessions: what the turns after the first cost, in tokens fed, and that nothing dropped stays out of reach."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specprefill import (
    Engine,
    EngineConfig,
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
from mlx_specprefill.adapters.capture import DraftHeads, Head, QueryCapture
from tests.engine.test_composition import masked_greedy
from tests.tiny import FAMILIES, generated, greedy, random_prompt, tiny_pair
from tests.waiting import eventually

DEMO = Path(__file__).parents[2] / "models" / "demo"
POLICY = SpecPrefillPolicy(threshold=300, keep_pct=Fraction(3, 10), densify=False)
CONFIG = EngineConfig(policy=POLICY, prefill_step=128, prefix_cache_bytes=64 << 20)
ALWAYS_EXTENDED = dataclasses.replace(CONFIG, selection=SelectionConfig(stands_out=math.inf))
NEVER_REPAIRED = dataclasses.replace(CONFIG, policy=dataclasses.replace(POLICY, repair_share=Fraction(0)))
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
        assert isinstance(last, Finished)
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
    with Engine(pair, ALWAYS_EXTENDED) as engine:
        sparse = seven_turns(engine, meter, AUTO)
    with Engine(pair, ALWAYS_EXTENDED) as engine:
        dense = seven_turns(engine, meter, OFF)
    assert [last.account.mode for _, _, last in sparse] == ["sparse"] * TURNS
    assert sparse[0][0] < dense[0][0]
    for (fed, scored, last), (cached, unscored, _) in zip(sparse[1:], dense[1:], strict=True):
        assert last.account.continuation == "extend"
        assert fed - ANSWER == last.account.kept_tokens - last.account.cached_tokens
        assert fed <= cached
        assert unscored == 0
        assert scored <= max(len(tool_result(0)) + ANSWER + 1, asking) + rows
        assert 0 < last.account.draft_tokens <= scored


@pytest.mark.parametrize(("stands_out", "expected"), [(1e9, "extend"), (1.0, "repair")])
def test_how_far_a_dropped_token_must_stand_out_is_configured(stands_out: float, expected: str) -> None:
    """Two turns with other questions."""
    pair = dataclasses.replace(tiny_pair(), heads=DraftHeads((Head(1, 0, 1.0),), 2, 2, {}))
    config = dataclasses.replace(CONFIG, selection=SelectionConfig(stands_out=stands_out))
    with Engine(pair, config) as engine:
        prompt = random_prompt(FIRST)
        answer, _ = generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=AUTO)))
        following = GenerationRequest((*prompt, *answer, *tool_result(0)), ANSWER, specprefill=AUTO)
        _, last = generated(engine.generate(following))
    assert isinstance(last, Finished)
    assert last.account.continuation == expected


def kept_of(last: Any) -> set[int]:
    return {index for start, end in last.account.kept_spans for index in range(start, end)}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_question_about_a_dropped_chunk_starts_over_at_any_turn(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three turns extend; the fourth wants a chunk that the first dropped."""
    pair, wanted = tiny_pair(family, "llama"), {"chunk": 0}

    def looks_at(self: Any, *_: Any) -> None:
        row = np.full(self.prompt_len, 1e-6, dtype=np.float32)
        row[32 * wanted["chunk"] : 32 * wanted["chunk"] + 32] = 1.0
        self._best = mx.array(row)
        self._count += 1

    monkeypatch.setattr(QueryCapture, "_add", looks_at)
    prompt, seen = random_prompt(FIRST), []
    with Engine(pair, NEVER_REPAIRED) as engine:
        for turn, chunk in enumerate((12, 12, 12, 20, 20)):
            wanted["chunk"] = chunk
            answer, last = generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=AUTO)))
            assert isinstance(last, Finished)
            seen.append((last.account.continuation, set(range(640, 672)) <= kept_of(last)))
            prompt = (*prompt, *answer, *tool_result(turn))
    assert seen == [(None, False), ("extend", False), ("extend", False), ("restart", True), ("extend", True)]


def wants(patch: pytest.MonkeyPatch, *chunks: int) -> None:
    """From now on the draft looks at these chunks."""

    def looks_at(self: Any, *_: Any) -> None:
        row = np.full(self.prompt_len, 1e-6, dtype=np.float32)
        for chunk in chunks:
            row[32 * chunk : 32 * chunk + 32] = 1.0
        self._best = mx.array(row)

    patch.setattr(QueryCapture, "_add", looks_at)


@pytest.mark.parametrize(("family", "cuttable"), [("llama", True), ("qwen3", True), ("nemotron_h", False)])
def test_starting_over_keeps_what_lies_before_the_missing_chunk(
    family: str, cuttable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is that of a masked dense run; the target reads less where its cache can be cut."""
    pair = tiny_pair(family, "llama")
    meter = Meter(pair, monkeypatch)
    wants(monkeypatch, 12)
    with Engine(pair, NEVER_REPAIRED) as engine:
        prompt = random_prompt(FIRST)
        answer, first = generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=AUTO)))
        wants(monkeypatch, 20)
        prompt = (*prompt, *answer, *tool_result(0))
        meter.take()
        tokens, last = generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=AUTO)))
        fed, _ = meter.take()
    kept = kept_of(last)
    assert isinstance(last, Finished)
    assert last.account.continuation == "restart"
    assert set(range(640, 672)) <= kept
    missing = min(kept - kept_of(first)) if cuttable else 640
    assert 640 - 32 < missing <= 640  # held together with what is asked for
    before = {i for i in kept if i < missing}
    assert (before == {i for i in kept_of(first) if i < missing}) or not cuttable
    assert fed - ANSWER == len(kept) - last.account.cached_tokens
    assert last.account.cached_tokens == len(before) or not cuttable
    if cuttable:
        assert tokens == masked_greedy(pair.target, prompt, sorted(kept), ANSWER)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_missing_chunks_are_put_in_and_nothing_else_is_read_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice. Fed is what was missing and what is new; the answer is that of the law with what was there when."""
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
            assert isinstance(last, Finished)
            assert last.account.continuation == "repair"
            late = {i for i in kept_of(last) - before if i < end - ANSWER}
            asked = {32 * chunk + i for chunk in missing for i in range(32)}
            assert asked <= before | late
            assert 0 < len(asked - before) <= len(late) <= 256
            assert kept_of(last) == before | late | set(range(end - ANSWER, len(prompt)))
            assert fed == len(late) + len(prompt) - end + ANSWER
            turns = np.concatenate([turns, np.full(end - turns.size, turn - 1), np.full(len(prompt) - end, turn)])
            turns[sorted(late)] = turn
            assert answer == masked_greedy(pair.target, prompt, sorted(kept_of(last)), ANSWER, turns)


@pytest.mark.parametrize(
    ("family", "way"), [("llama", "repair"), ("nemotron_h", "restart"), ("qwen3_5", "restart"), ("gpt_oss", "restart")]
)
def test_only_caches_that_hold_all_they_were_fed_are_repaired(
    family: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recurrent state can't take a token in the middle, and a window no longer has what one would see."""
    prompt = random_prompt(FIRST)
    wants(monkeypatch, 12)
    with Engine(tiny_pair(family, "llama"), CONFIG) as engine:
        answer, _ = generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=AUTO)))
        wants(monkeypatch, 12, 20)
        prompt = (*prompt, *answer, *tool_result(0))
        _, last = generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=AUTO)))
    assert isinstance(last, Finished)
    assert last.account.continuation == way
    assert set(range(640, 672)) <= kept_of(last)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_changed_prompt_extends_what_is_left_of_the_session(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert isinstance(last, Finished)
    assert last.account.continuation == "extend"
    assert kept_of(last) == {i for i in kept_of(first) if i < FIRST - 20} | set(range(FIRST - 20, FIRST + 10))
    assert fed == 30 + ANSWER
    assert tokens == masked_greedy(pair.target, changed, sorted(kept_of(last)), ANSWER)


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
            assert isinstance(last, Finished)
            assert last.account.continuation is None
            assert kept_of(last) == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.extended
def test_a_new_engine_on_the_same_folder_starts_from_what_the_old_one_stored(family: str, tmp_path: Path) -> None:
    """The second conversation begins with the first one's prompt; the process between them is gone."""
    pair, prompt = tiny_pair(family), random_prompt(600)
    config = dataclasses.replace(CONFIG, prefix_cache_dir=tmp_path)
    longer = (*prompt, *random_prompt(30, 5))
    with Engine(pair, config) as engine:
        first, _ = generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=OFF)))
    with Engine(tiny_pair(family), config) as engine:
        tokens, last = generated(engine.generate(GenerationRequest(longer, ANSWER, specprefill=OFF)))
        again, warm = generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=OFF)))
    assert isinstance(last, Finished)
    assert isinstance(warm, Finished)
    assert last.account.cached_tokens >= len(prompt) - 1
    assert tokens == greedy(pair.target, longer, ANSWER)
    assert again == first
    assert warm.account.cached_tokens == len(prompt) - 1


def test_another_models_folder_is_not_used(tmp_path: Path) -> None:
    prompt, config = random_prompt(300), dataclasses.replace(CONFIG, prefix_cache_dir=tmp_path)
    with Engine(tiny_pair("llama"), config) as engine:
        generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=OFF)))
    with Engine(tiny_pair("qwen3"), config) as engine:
        _, last = generated(engine.generate(GenerationRequest(prompt, ANSWER, specprefill=OFF)))
    assert isinstance(last, Finished)
    assert last.account.cached_tokens == 0


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
        return tuple(
            PromptSpan(kind, a, a + 3, z, z + 2)  # type: ignore[arg-type]
            for kind, a, z in zip(kinds, starts, ends, strict=False)
        )


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
            chat, (text, codes) = Chat(engine), haystack(seed, 1200)
            done = engine.stats().densified
            first, end = chat.ask(f"{text}\n\nWhat is the secret code for {NAMES[2]}?")
            assert end.account.mode == "sparse"
            dropped = next((name for name in NAMES if not in_kept(pair, chat, end, codes[name])), None)
            if idle:
                assert eventually(lambda done=done: engine.stats().densified > done, 200)
            if dropped is None or codes[NAMES[2]] not in first:
                continue
            second, end = chat.ask(f"What is the secret code for {dropped}?")
            assert end.account.mode == ("full" if idle else "sparse")
            assert idle or in_kept(pair, chat, end, codes[dropped])
            swaps += 1
            right += codes[dropped] in second
    assert swaps >= 2
    assert right == swaps


def in_kept(pair: ModelPair, chat: Chat, end: Finished, code: str) -> bool:
    """Whether the target has seen all digits of a code in the first message."""
    prompt = pair.tokenizer.apply_chat_template(chat.messages[:1], add_generation_prompt=True)
    return index_of(pair, prompt, code) <= kept_of(end)
