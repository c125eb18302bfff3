"""Verdicts on sparse answers equal a dense rerun by independent code."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_specprefill import (
    Constraint,
    Engine,
    EngineConfig,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    ModelPair,
    RequestHandle,
    SamplingParams,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    TokenEvent,
    Verdict,
    load_pair,
)
from mlx_specprefill.engine.thread import loop
from tests.support.tiny import VOCAB, on_own_layers, random_prompt, tiny_pair
from tests.support.verdict_oracle import read_in_full
from tests.support.waiting import eventually

MODELS = Path(__file__).resolve().parents[3] / "models"
FAMILIES = ("demo", "demo-qwen3_5", "demo-nemotron_h", "demo-gpt_oss")
OWN_LAYERS = {
    "demo": 2,
    "demo-nemotron_h": 6,
    "demo-gpt_oss": 2,
}  # no fewer than all see all in qwen3_5
NAMES = ("Anna", "Bernd", "Clara", "David", "Emma", "Felix", "Greta", "Hugo")
TOP_K = 20
ASKED = SpecPrefillOptions(enabled=True, verify=True)
LENGTH = 12
GROUP = 6  # answers at once; of more than eight turns that wait for idle time, the oldest go
ROUNDING = 4e-3  # of log-probabilities in float32, and of their differences


def config(kv_bits: int | None = None) -> EngineConfig:
    policy = SpecPrefillPolicy(threshold=100, keep_pct=Fraction(1, 5))
    return EngineConfig(policy=policy, prefill_step=128, prefix_cache_bytes=256 << 20, kv_bits=kv_bits)


@dataclass
class Answer:
    """One answer and what became known of it."""

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    end: Finished | Failed | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    handle: RequestHandle | None = None

    def saw(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self.tokens.append(event.token)
        if isinstance(event, Finished | Failed):
            self.end = event
            self.ended.set()

    @property
    def verdict(self) -> Verdict:
        (verdict,) = self.verdicts
        return verdict


def begin(engine: Engine, request: GenerationRequest) -> Answer:
    answer = Answer(request)
    answer.handle = engine.submit(request, answer.saw, answer.verdicts.append)
    return answer


def ask(engine: Engine, request: GenerationRequest) -> Answer:
    answer = begin(engine, request)
    assert answer.ended.wait(120)
    return answer


def ask_all(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Answer]:
    answers = [begin(engine, request) for request in requests]
    assert all(answer.ended.wait(240) for answer in answers)
    return answers


def text(seed: int) -> str:
    rng = np.random.default_rng(seed)
    codes = {name: rng.integers(100000, 999999) for name in NAMES}
    filler = [f"On day {day} the ship sailed {rng.integers(50)} miles and met nobody." for day in range(25)]
    facts = [f"The secret code for {name} is {code}." for name, code in codes.items()]
    lines = [*filler, *facts]
    rng.shuffle(lines)
    return "\n".join([*lines, "", f"The secret code for {NAMES[seed % len(NAMES)]} is"])


def requests(pair: ModelPair, count: int, first: int = 0) -> list[GenerationRequest]:
    """Prompts with an answer that may get lost; every other one is sampled."""
    made = []
    for seed in range(first, first + count):
        sampling = SamplingParams(temperature=1.0, top_k=TOP_K, seed=seed) if seed % 2 else SamplingParams()
        prompt = pair.tokenizer.encode(text(seed))
        made.append(GenerationRequest(prompt, LENGTH, sampling, ASKED))
    return made


def check(answer: Answer, pair: ModelPair, kv_bits: int | None) -> None:
    """Hold the verdict to the truth."""
    truth = read_in_full(pair.target, answer.request.prompt.tolist(), answer.tokens, kv_bits)
    agrees = answer.verdict.agrees.tolist()
    if answer.request.sampling.temperature > 0:
        assert agrees == truth.reach(TOP_K)
    else:
        close = ROUNDING if kv_bits is None else 0.1  # nearer to the choice either is right
        assert [agrees[i] if 0 < behind < close else behind == 0 for i, behind in enumerate(truth.behind)] == agrees
    assert answer.verdict.counted.all()
    assert answer.verdict.word == ("same" if all(agrees) else "differs")


@contextmanager
def verified(pair: ModelPair, kv_bits: int | None = None) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch, Engine(pair, config(kv_bits)) as engine:
        patch.setattr(loop, "_QUIET_S", 0.0)
        yield engine


def load(family: str, own_layers: bool) -> ModelPair:
    target = str(MODELS / family / "target")
    if own_layers:
        return on_own_layers(load_pair(target, dtype="float32"), OWN_LAYERS[family])
    return load_pair(target, str(MODELS / family / "draft"), dtype="float32")


def verdicts_on(engine: Engine, group: Sequence[GenerationRequest]) -> list[Answer]:
    """Return the answers to requests that come at once, when all of them are verified."""
    answers = ask_all(engine, group)
    assert eventually(lambda: all(answer.verdicts for answer in answers), 300)
    return answers


def hold_to_the_truth(family: str, own_layers: bool, kv_bits: int | None, count: int) -> list[Answer]:
    pair = load(family, own_layers)
    with verified(pair, kv_bits) as engine:
        asked = requests(pair, count)
        groups = [[one] for one in asked[: count // 2]]
        groups += [asked[start : start + GROUP] for start in range(count // 2, count, GROUP)]
        answers = [answer for group in groups for answer in verdicts_on(engine, group)]
    for answer in answers:
        assert isinstance(answer.end, Finished)
        assert answer.end.report.mode == "sparse"
        check(answer, pair, None if family == "demo-gpt_oss" else kv_bits)  # rings stay unquantised
    return answers


def each(families: Iterable[str], *in_every_run: str) -> list[Any]:
    """Mark `demo` for CI, and the others for the night, when 200 answers of every family are compared."""
    ci, night = pytest.mark.extended, pytest.mark.nightly
    others = (name for name in families if name not in in_every_run)
    return [*in_every_run, *(pytest.param(name, marks=ci if name == "demo" else night) for name in others)]


@pytest.mark.parametrize("family", each(FAMILIES, "demo"))
def test_verdicts_equal_a_dense_rerun(family: str) -> None:
    hold_to_the_truth(family, False, None, 4)


@pytest.mark.parametrize("family", each(OWN_LAYERS))
def test_verdicts_where_its_own_layers_choose_equal_a_dense_rerun(family: str) -> None:
    hold_to_the_truth(family, True, None, 4)


@pytest.mark.parametrize("family", each(["demo", "demo-qwen3_5"]))
def test_verdicts_of_a_quantised_cache_equal_a_dense_rerun(family: str) -> None:
    hold_to_the_truth(family, False, 8, 4)


# --- on random models -------------------------------------------------------------------------------------------------


def tiny_request(length: int = 400, seed: int = 0, **changes: object) -> GenerationRequest:
    prompt = random_prompt(length, seed)
    return dataclasses.replace(GenerationRequest(prompt, LENGTH, specprefill=ASKED), **changes)


def test_one_forward_more_than_making_the_prompt_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 3 % of the prompt's tokens are read for the verdict: its answer, which the next turn needs anyway."""
    pair, read = tiny_pair(), list[int]()
    with verified(pair) as engine:
        call = type(pair.target).__call__

        def counting(model: object, tokens: object, *args: object, **kwargs: object) -> object:
            if model is pair.target and tokens.shape[1] > 1:  # type: ignore[attr-defined]
                read.append(tokens.shape[1])  # type: ignore[attr-defined]
            return call(model, tokens, *args, **kwargs)

        answer = begin(engine, tiny_request(1200))
        assert answer.ended.wait(60)
        monkeypatch.setattr(type(pair.target), "__call__", counting)
        assert eventually(lambda: bool(answer.verdicts))
    assert sum(read) <= 1200 + LENGTH + 1
    assert read[-1] == LENGTH
    assert LENGTH / 1200 <= 0.03


def test_penalties_and_biases_are_full_reading_s_own_too() -> None:
    """The truth chooses by its own logits less the penalty of each token that came before."""
    sampling = SamplingParams(frequency_penalty=2.0, logit_bias={7: 3.0})
    pair = tiny_pair()
    with verified(pair) as engine:
        answer = ask(engine, tiny_request(sampling=sampling))
        assert eventually(lambda: bool(answer.verdicts))
    truth = read_in_full(pair.target, answer.request.prompt.tolist(), answer.tokens)
    own, before = [], np.zeros(VOCAB)
    for row, token in zip(truth.logprobs, answer.tokens, strict=True):
        biased = row - 2.0 * before
        biased[7] += 3.0
        own.append(int(biased.argmax()))
        before[token] += 1
    assert answer.verdict.agrees.tolist() == [a == b for a, b in zip(own, answer.tokens, strict=True)]


@pytest.mark.extended
def test_what_a_grammar_decided_is_left_out() -> None:
    """A token counts where full reading's favourite was allowed and was not alone."""
    pair = load("demo", False)
    prompt = pair.tokenizer.encode(text(1))
    grammar = Constraint("start: /[0-9]{6}X/")
    with verified(pair) as engine:
        answer = ask(engine, GenerationRequest(prompt, LENGTH, specprefill=ASKED, constraint=grammar))
        assert eventually(lambda: bool(answer.verdicts))
    truth = read_in_full(pair.target, prompt, answer.tokens)
    favourites = [pair.tokenizer.decode([token]) for token in truth.own]
    counted = answer.verdict.counted.tolist()
    assert pair.tokenizer.decode(answer.tokens)[6] == "X"
    assert all(favourites[i].isdigit() for i, counts in enumerate(counted) if counts), favourites
    assert 0 < sum(counted) < len(answer.tokens)
    assert not counted[-1]  # nothing but the end was allowed behind X


def test_a_turn_that_is_overtaken_is_unknown() -> None:
    pair, first = tiny_pair(), tiny_request()
    with Engine(pair, config()) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_QUIET_S", math.inf)
        earlier = ask(engine, first)
        longer = (*first.prompt.tolist(), *earlier.tokens, *random_prompt(300, 9))
        later = ask(engine, dataclasses.replace(first, prompt=longer))
        assert eventually(lambda: bool(earlier.verdicts))
        assert (earlier.verdict.word, later.verdicts) == ("unknown", [])
    assert later.verdict.word == "unknown"  # the engine was closed


def test_nothing_is_verified_that_was_not_asked_for_or_read_in_full() -> None:
    pair = tiny_pair()
    with verified(pair) as engine:
        silent = ask(engine, tiny_request(specprefill=SpecPrefillOptions(enabled=True)))
        full = ask(engine, tiny_request(seed=1, specprefill=SpecPrefillOptions(enabled=False, verify=True)))
        assert eventually(lambda: not engine.densifier.turns)
    assert silent.verdicts == full.verdicts == []


def test_an_answer_that_could_be_any_is_unknown() -> None:
    """Without filters every token can be drawn, whatever was read. With one there is a verdict."""
    with verified(tiny_pair()) as engine:
        kinds = [SamplingParams(temperature=1.0, seed=1, top_k=most) for most in (0, TOP_K)]
        free, filtered = verdicts_on(
            engine, [tiny_request(seed=seed, sampling=kind) for seed, kind in enumerate(kinds)]
        )
    assert free.verdict.agrees.all()
    assert free.verdict.word == "unknown"
    assert filtered.verdict.word in ("same", "differs")
