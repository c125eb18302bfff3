"""Questions behind a prompt are answered as by decoding, one at a time; the prompt's cache serves other questions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from mlx_specprefill import (
    ContextLengthError,
    Decisions,
    Engine,
    EngineConfig,
    Event,
    Finished,
    GenerationRequest,
    InvalidRequestError,
    ModelPair,
    Progress,
    PromptLogprobs,
    Question,
    SpecPrefillOptions,
    SpecPrefillPolicy,
)
from mlx_specprefill.selection.heads import DraftHeads, Head
from tests.support.tiny import EOS, FAMILIES, VOCAB, random_prompt, tiny_pair

FULL, SPARSE = SpecPrefillOptions(False), SpecPrefillOptions(True)
TOLERANCE = 1e-5
HEADS = DraftHeads((Head(1, 0, 0.6), Head(2, 3, 0.4)), 3, 3, {"copy": 1.0})


def questions_of(count: int, seed: int = 0) -> tuple[Question, ...]:
    """Questions of 1 to 30 tokens; every third one has labels that begin alike, one of them with a single token."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        first = [int(token) for token in rng.choice(np.arange(2, VOCAB), 4, replace=False)]
        labels: tuple[tuple[int, ...], ...] = tuple((token,) for token in first)
        if i % 3 == 2:
            labels = ((first[0],), (first[0], first[1]), (first[0], first[2], first[3]), (first[1], first[0]))
        made.append(Question(random_prompt(int(rng.integers(1, 30)), seed + i), labels))
    return tuple(made)


def config_of(**changes: object) -> EngineConfig:
    return EngineConfig(policy=SpecPrefillPolicy(threshold=10_000, densify=False), prefill_step=64, **changes)


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(tiny_pair(request.param), config_of()) as running:
        yield running


@pytest.fixture(scope="module")
def scoring() -> Iterator[Engine]:
    """An engine whose draft has calibrated heads."""
    with Engine(with_heads_of(tiny_pair()), config_of()) as running:
        yield running


def with_heads_of(pair: ModelPair) -> ModelPair:
    return replace(pair, heads=HEADS)


def events_of(engine: Engine, prompt: Sequence[int], questions: Sequence[Question], **fields: object) -> list[Event]:
    request = GenerationRequest(prompt, 0, questions=tuple(questions), **{"specprefill": FULL, **fields})
    return list(engine.generate(request))


def decided(events: Sequence[Event]) -> Decisions:
    (found,) = [event for event in events if isinstance(event, Decisions)]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "length"
    return found


def read_by(events: Sequence[Event]) -> int:
    """Return the tokens that the target has read."""
    return max(event.done for event in events if isinstance(event, Progress) and event.stage == "prefill")


def logprobs_of(engine: Engine, prompt: Sequence[int], label: Sequence[int]) -> list[float]:
    """Return what an echo of the prompt with the label says of each of the label's tokens."""
    request = GenerationRequest([*prompt, *label], 0, prompt_logprobs=0)
    (found,) = [event for event in engine.generate(request) if isinstance(event, PromptLogprobs)]
    return [own.logprob for own, _ in found.entries[-len(label) :]]


def expected(engine: Engine, prompt: Sequence[int], question: Question) -> np.ndarray:
    asked = [*prompt, *question.tokens.tolist()]
    each = [logprobs_of(engine, asked, label) for label in question.labels]
    first = len({label[0] for label in question.labels}) == len(question.labels)
    scores = np.array([own[0] if first else np.mean(own) for own in each])
    shares = np.exp(scores - scores.max())
    return shares / shares.sum()


def test_equal_to_decoding(engine: Engine) -> None:
    prompt, questions = random_prompt(300), questions_of(9)
    found = decided(events_of(engine, prompt, questions))
    assert found.kept is not None
    assert found.kept.tolist() == [True] * 9
    for question, shares in zip(questions, found.probabilities, strict=True):
        assert np.abs(shares - expected(engine, prompt, question)).max() < TOLERANCE
        assert abs(shares.sum() - 1) < TOLERANCE


def test_read_together_as_alone_behind_a_sparse_prompt(scoring: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, questions = random_prompt(900, 3), questions_of(6, 5)
    options = {"specprefill": SPARSE}
    together = events_of(scoring, prompt, questions, **options)
    monkeypatch.setattr(scoring.prefiller.decider, "_places_tokens", False)
    alone = events_of(scoring, prompt, questions, **options)
    last = together[-1]
    assert isinstance(last, Finished)
    assert last.report.mode == "sparse"
    for one, other in zip(decided(together).probabilities, decided(alone).probabilities, strict=True):
        assert np.abs(one - other).max() < TOLERANCE


def test_other_questions_read_only_themselves(engine: Engine) -> None:
    prompt, first, second = random_prompt(300, 7), questions_of(4), questions_of(6, 11)
    fresh = [expected(engine, prompt, question) for question in second]
    events_of(engine, prompt, first)
    events = events_of(engine, prompt, second)
    assert read_by(events) == 1 + sum(question.tokens.size for question in second)
    for shares, wanted in zip(decided(events).probabilities, fresh, strict=True):
        assert np.abs(shares - wanted).max() < TOLERANCE


def test_a_question_decides_what_is_read(scoring: Engine) -> None:
    """The place that each question looks at is read, whichever it is; other questions recall others."""
    prompt, questions = random_prompt(600, 13), questions_of(6, 17)
    events = events_of(scoring, prompt, questions, specprefill=SpecPrefillOptions(True, scope="all"))
    found, last = decided(events), events[-1]
    assert isinstance(last, Finished)
    assert last.report.mode == "sparse"
    assert found.kept is not None
    assert found.kept.all()
    assert last.report.kept_tokens < 600
    again = events_of(scoring, prompt, questions_of(6, 23), specprefill=SpecPrefillOptions(True, scope="all"))
    assert decided(again).kept is not None
    assert read_by(again) < 300


def test_without_calibrated_heads_all_is_read() -> None:
    with Engine(tiny_pair(), config_of()) as engine:
        *_, last = events_of(engine, random_prompt(400), questions_of(2), specprefill=SPARSE)
        assert isinstance(last, Finished)
        assert (last.report.mode, last.report.reason_code) == ("full", "unsupported")


def test_a_cancelled_request_leaves_its_prompt(engine: Engine) -> None:
    """Cancelled among its questions. What it has kept of its prompt is what the prompt alone would have left."""
    prompt, questions = random_prompt(300, 29), questions_of(60, 31)
    request = GenerationRequest(prompt, 0, questions=questions, specprefill=FULL)
    events = engine.generate(request)
    for event in events:
        if isinstance(event, Progress) and event.stage == "prefill" and event.done > 300:
            break
    events.close()
    again = questions_of(3, 37)
    for question, shares in zip(again, decided(events_of(engine, prompt, again)).probabilities, strict=True):
        assert np.abs(shares - expected(engine, prompt, question)).max() < TOLERANCE


def test_more_questions_need_no_more_memory() -> None:
    with Engine(tiny_pair(), config_of(memory_limit=64 << 20)) as engine:
        one, many = (
            engine.memory.need(GenerationRequest(random_prompt(1000), 0, questions=questions_of(count)), "full")
            for count in (100, 400)
        )
        assert many == one
        found = decided(events_of(engine, random_prompt(1000), questions_of(400)))
        assert len(found.probabilities) == 400


def test_questions_share_the_room_that_is_left(scoring: Engine) -> None:
    """Each begins behind the prompt: together they may be longer than the context."""
    questions = questions_of(60)
    prompt = random_prompt(4096 - max(question.room for question in questions))
    assert len(decided(events_of(scoring, prompt, questions)).probabilities) == 60


@pytest.mark.parametrize(
    "question",
    [
        Question((), ((3,), (4,))),
        Question((5,), ((3,),)),
        Question((5,), ((3,), ())),
        Question((VOCAB,), ((3,), (4,))),
        Question((5,), ((3,), (VOCAB,))),
    ],
)
def test_a_question_without_sense_is_named(scoring: Engine, question: Question) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        events_of(scoring, random_prompt(40), (Question((EOS,), ((3,), (4,))), question))
    assert refused.value.field == "questions[1]"


def test_a_question_beyond_the_context_is_named(scoring: Engine) -> None:
    long = Question(random_prompt(100), ((3,), (4,)))
    with pytest.raises(ContextLengthError) as refused:
        events_of(scoring, random_prompt(4000), (long,))
    assert refused.value.field == "questions[0]"
