"""Drafted answers inside the engine: the same tokens as plain ones, alone and beside others, told in the report."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from mlx_lm.models.cache import KVCache

from mlx_specprefill import (
    Constraint,
    Engine,
    EngineConfig,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    ModelPair,
    PrefillReport,
    SamplingParams,
    SpecPrefillOptions,
    SpecPrefillPolicy,
    SpeculationConfig,
    SpeculationName,
    SpeculationReport,
    TokenEvent,
    make_pair,
)
from mlx_specprefill.engine.requests import drafting as module
from tests.server.fakes import byte_tokenizer
from tests.support import precision
from tests.support.tiny import EOS, generated, random_prompt, tiny_head, tiny_model, tiny_pair

SMALL = SpeculationConfig(budget=64, chunk=4, sinks=4, window=16, ngram_match=1)
NAMES: tuple[SpeculationName, ...] = ("draft", "triforce", "mtp", "ngram")
COUNT = 30
NO_HEAD = "it was not loaded from a checkpoint"


def configured(**changes: Any) -> EngineConfig:
    policy = SpecPrefillPolicy(densify=False)
    return EngineConfig(policy=policy, prefill_step=32, speculation=SMALL, **changes)


def asked(
    seed: int, how: SpeculationName | None, sparse: bool = False, count: int = COUNT, length: int = 90, **changes: Any
) -> GenerationRequest:
    options = SpecPrefillOptions(enabled=sparse, speculative=how)
    return GenerationRequest(random_prompt(length, seed), count, specprefill=options, **changes)


def told(last: Any) -> tuple[PrefillReport, SpeculationReport]:
    assert isinstance(last, Finished)
    assert last.report.speculation is not None
    return last.report, last.report.speculation


@pytest.fixture(scope="module", params=["llama", "qwen3_5", "gpt_oss"])
def pair(request: pytest.FixtureRequest) -> ModelPair:
    """The hybrid target has an MTP head; the others decode plainly where one is asked for."""
    pair = tiny_pair(request.param, "llama")
    return replace(pair, own_parts={"mtp": tiny_head(pair.target)}) if request.param == "qwen3_5" else pair


@pytest.fixture(scope="module")
def engine(pair: ModelPair) -> Iterator[Engine]:
    with Engine(pair, configured()) as running:
        yield running


@pytest.mark.extended
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("how", NAMES)
def test_an_answer_is_the_plain_one(engine: Engine, how: SpeculationName, sparse: bool) -> None:
    plain, last = generated(engine.generate(asked(1, None, sparse)))
    assert last.report.speculation is None
    drafted, last = generated(engine.generate(asked(1, how, sparse)))
    assert drafted == plain
    report, speculation = told(last)
    assert report.mode == ("sparse" if sparse else "full")
    assert "speculation" in report.to_dict()
    if how == "mtp" and not engine.pair.own_parts:
        assert (speculation.strategy, speculation.reason) == ("autoregressive", NO_HEAD)
        return
    assert (speculation.strategy, speculation.reason) == (how, "requested")
    assert speculation.tokens_per_step is not None
    assert 1.0 <= speculation.tokens_per_step <= 9.0


def collected(inbox: queue.SimpleQueue[Any]) -> tuple[list[int], Any]:
    events: list[Any] = []
    while not events or not isinstance(events[-1], (Finished, Failed)):
        events.append(inbox.get(timeout=60))
    return generated(iter(events))


def after(posted: threading.Event, inbox: queue.SimpleQueue[Any]) -> Callable[[Event], None]:
    """A callback that keeps the engine until all is posted: the first row might be over before the last comes."""

    def on_event(event: Event) -> None:
        posted.wait(60)
        inbox.put(event)

    return on_event


@pytest.mark.extended
def test_rows_of_all_kinds_beside_each_other(engine: Engine) -> None:
    """Plain, drafted, sparse and dense rows that start while others run; each answers what it answers alone."""
    kinds: tuple[SpeculationName | None, ...] = (None, *NAMES, "triforce", None, "draft")
    requests = [asked(seed, how, seed % 2 == 0) for seed, how in enumerate(kinds)]
    plain = [replace(r, specprefill=replace(r.specprefill, speculative=None)) for r in requests]
    alone = [generated(engine.generate(request))[0] for request in plain]
    inboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in requests]
    for request, inbox in zip(requests, inboxes, strict=True):
        engine.submit(request, inbox.put)
    for inbox, expected in zip(inboxes, alone, strict=True):
        tokens, last = collected(inbox)
        assert isinstance(last, Finished), last
        assert tokens == expected


def test_the_answer_ends_where_it_ends(engine: Engine) -> None:
    answer, _ = generated(engine.generate(asked(3, None)))
    for how in NAMES:
        for stop in sorted(set(answer[:8])):
            request = asked(3, how, stop_token_ids=frozenset({stop}))
            tokens, last = generated(engine.generate(request))
            assert tokens == answer[: answer.index(stop) + 1]
            assert last.reason == "stop"


def test_what_a_drafted_turn_leaves_serves_the_next_one(engine: Engine) -> None:
    first = asked(11, "draft")
    answer, _ = generated(engine.generate(first))
    later = GenerationRequest((*first.prompt, *answer, 5, 6, 7), 8, specprefill=SpecPrefillOptions(enabled=False))
    tokens, last = generated(engine.generate(later))
    assert last.report.cached_tokens >= len(first.prompt)
    with Engine(engine.pair, configured(prefix_cache_bytes=0)) as fresh:
        assert generated(fresh.generate(later))[0] == tokens


@pytest.mark.parametrize("how", NAMES)
@pytest.mark.extended
def test_a_prompt_from_the_cache_is_drafted_for(engine: Engine, how: SpeculationName) -> None:
    """Drafts may know such a prompt only from its middle on. A repeated and a longer prompt get their plain answers."""
    first, _ = generated(engine.generate(asked(21, None)))
    same = asked(21, how)
    longer = replace(same, prompt=(*same.prompt, *first, 5, 6, 7))
    for request in (same, longer):
        tokens, last = generated(engine.generate(request))
        assert told(last)[0].cached_tokens > 0
        plain = replace(request, specprefill=replace(request.specprefill, speculative=None))
        assert tokens == generated(engine.generate(plain))[0]


def test_a_cancelled_row_ends_within_a_step(engine: Engine) -> None:
    """Rows beside it, drafted or not, go on as if nothing had been."""
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    others: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(2)]
    requests = [asked(5, "draft"), asked(6, None)]
    alone = [generated(engine.generate(request))[0] for request in requests]
    handle = engine.submit(asked(4, "triforce", count=2000), inbox.put)
    for request, other in zip(requests, others, strict=True):
        engine.submit(request, other.put)
    while not isinstance(inbox.get(timeout=60), TokenEvent):
        pass
    handle.cancel()
    _, last = collected(inbox)
    assert isinstance(last, Finished)
    assert last.reason == "cancelled"
    assert [collected(other)[0] for other in others] == alone
    assert len(engine.rows) == 0


@pytest.mark.parametrize("how", NAMES)
def test_what_is_reported_and_adjusted_is_that_of_a_plain_answer(engine: Engine, how: SpeculationName) -> None:
    """Penalties and biases follow the text inside a proposal, held-back stops stay away; log-probabilities are the
    target's."""
    penalised = SamplingParams(presence_penalty=1.5, repetition_penalty=1.2, logit_bias={EOS: 40.0})
    request = asked(8, how, True, sampling=penalised, logprobs=2, min_tokens=9, stop_token_ids=frozenset({EOS}))
    plain = replace(request, specprefill=replace(request.specprefill, speculative=None))
    ours, theirs = (
        [event for event in engine.generate(each) if isinstance(event, TokenEvent)] for each in (request, plain)
    )
    assert [event.token for event in ours] == [event.token for event in theirs]
    assert len(ours) >= 10
    assert [event.logprob for event in ours] == pytest.approx([event.logprob for event in theirs], abs=1e-4)
    for mine, other in zip(ours, theirs, strict=True):
        assert [best.token for best in mine.top_logprobs] == [best.token for best in other.top_logprobs]


COLUMNS = len(byte_tokenizer()) + 9


@pytest.mark.extended
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("how", ["draft", "triforce", "ngram"])
def test_drafted_answers_follow_their_grammar(how: SpeculationName, temperature: float) -> None:
    """Both sides of a proposal are masked, so greedy answers are the plain ones and sampled ones are words of it."""
    tokenizer, config = byte_tokenizer(), {"max_position_embeddings": 4096, "vocab_size": COLUMNS}
    target, draft = (tiny_model("llama", seed=seed, vocab_size=COLUMNS) for seed in (3, 4))
    pair = make_pair(target, tokenizer, config, draft=draft, draft_config=config)
    request = GenerationRequest(
        tuple(tokenizer.encode("a list of words ")) * 5,
        60,
        SamplingParams(temperature=temperature),
        stop_token_ids=frozenset(tokenizer.eos_token_ids),
        constraint=Constraint("start: /(ab|cde?){6,9}x/"),
    )
    with Engine(pair, configured()) as engine:
        plain, _ = generated(engine.generate(request))
        drafted, last = generated(engine.generate(replace(request, specprefill=SpecPrefillOptions(speculative=how))))
    assert told(last)[1].strategy == how
    assert re.fullmatch("(ab|cde?){6,9}x", tokenizer.decode(drafted[:-1]))
    assert temperature > 0 or drafted == plain


# --- what goes wrong -------------------------------------------------------------------------------------------------


def fail(*_: Any, **__: Any) -> Any:
    raise ArithmeticError("no way on")


@pytest.mark.parametrize("how", NAMES)
@pytest.mark.extended
def test_a_prefill_that_falls_back_is_drafted_all_the_same(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, how: SpeculationName
) -> None:
    plain, _ = generated(engine.generate(asked(9, None)))
    monkeypatch.setattr("mlx_specprefill.engine.reading.scoring.select_part", fail)
    tokens, last = generated(engine.generate(asked(9, how, True)))
    assert tokens == plain
    report, speculation = told(last)
    assert report.reason.startswith("fallback: select failed")
    assert speculation.reason in ("requested", NO_HEAD)


@pytest.mark.parametrize("where", ["start", "propose", "accept"])
def test_a_proposer_that_fails_costs_the_saving_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    plain, _ = generated(engine.generate(asked(6, None)))
    monkeypatch.setattr(f"mlx_specprefill.speculative.drafter.Drafter.{where}", fail)
    tokens, last = generated(engine.generate(asked(6, "draft")))
    assert tokens == plain
    _, speculation = told(last)
    assert "no way on" in speculation.reason


def test_what_a_pair_cannot_do_is_told() -> None:
    pair = tiny_pair("llama")
    alone = replace(pair, draft=None, draft_id=None, draft_context=None, sparse_refusal="no draft model is loaded")
    with Engine(alone, configured()) as engine:
        plain, _ = generated(engine.generate(asked(1, None)))
        for how, reason in (("draft", "there is no draft model"), ("triforce", "there is no draft model")):
            tokens, last = generated(engine.generate(asked(1, how)))
            assert tokens == plain
            _, speculation = told(last)
            assert (speculation.strategy, speculation.reason) == ("autoregressive", reason)
        assert told(generated(engine.generate(asked(1, "ngram")))[1])[1].strategy == "ngram"
        assert "checkpoint" in told(generated(engine.generate(asked(1, "mtp")))[1])[1].reason


def test_a_quantised_cache_drafts_but_is_not_retrieved() -> None:
    pair = tiny_pair("llama", head_dim=64, hidden_size=64)
    with Engine(pair, configured(kv_bits=8)) as engine:
        plain, _ = generated(engine.generate(asked(1, None, sparse=True)))
        tokens, last = generated(engine.generate(asked(1, "draft", sparse=True)))
        assert tokens == plain
        assert told(last)[1].strategy == "draft"
        tokens, last = generated(engine.generate(asked(1, "triforce", sparse=True)))
        assert tokens == plain
        assert "quantised" in told(last)[1].reason


# --- beside others ---------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_beside_others_a_drafted_answer_joins_the_batch(engine: Engine) -> None:
    """Its report says so, and what it proposed before still counts; the one that comes is not drafted at all."""
    requests = [asked(2, "draft", True, 80), asked(3, "draft", True, 80)]
    plain = [generated(engine.generate(asked(seed, None, True, 80)))[0] for seed in (2, 3)]
    inboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in requests]
    posted = threading.Event()
    for request, inbox in zip(requests, inboxes, strict=True):
        engine.submit(request, after(posted, inbox))
    posted.set()
    ended = [collected(inbox) for inbox in inboxes]
    assert [tokens for tokens, _ in ended] == plain
    first, second = (told(last)[1] for _, last in ended)
    assert (first.strategy, second.strategy) == ("draft", "autoregressive")
    assert "requested; then plain decoding: other answers are running" in first.reason
    assert first.tokens_per_step is not None
    assert "other answers are running" in second.reason


def test_two_that_begin_at_once_both_go_on_plainly(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are decided on before either decodes."""
    plain = [generated(engine.generate(asked(seed, None)))[0] for seed in (2, 3)]
    monkeypatch.setattr(module.Speculator, "refusal", lambda *_: None)
    inboxes: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in plain]
    posted = threading.Event()
    for seed, inbox in zip((2, 3), inboxes, strict=True):
        engine.submit(asked(seed, "ngram"), after(posted, inbox))
    posted.set()
    ended = [collected(inbox) for inbox in inboxes]
    assert [tokens for tokens, _ in ended] == plain
    assert any("then plain decoding" in told(last)[1].reason for _, last in ended)


def test_a_seeded_text_is_not_drafted(engine: Engine) -> None:
    """It would depend on whether other answers run."""
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=5)
    plain, _ = generated(engine.generate(asked(5, None, sampling=sampling)))
    for how in NAMES:
        tokens, last = generated(engine.generate(asked(5, how, sampling=sampling)))
        assert tokens == plain
        _, speculation = told(last)
        assert speculation.strategy == "autoregressive"


def test_a_request_that_asks_for_no_drafts_has_no_drafter(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AnswerDrafter", fail)
    for how in (None, "off"):
        _, last = generated(engine.generate(asked(1, how, True)))
        assert last.report.speculation is None


def test_admission_counts_the_entries_of_what_proposes() -> None:
    """Keys and values of every token of prompt and answer, where the head or the draft may be used."""
    pair = tiny_pair("qwen3_5", "llama")
    args, small = pair.target.language_model.args, pair.draft.args
    entry = 2 * args.num_key_value_heads * args.head_dim * precision.dtype().size  # bytes
    width = small.num_key_value_heads * small.hidden_size // small.num_attention_heads
    drafts = 2 * small.num_hidden_layers * width * precision.dtype().size
    with Engine(replace(pair, own_parts={"mtp": tiny_head(pair.target)}), configured(memory_limit=1 << 34)) as engine:
        generated(engine.generate(asked(1, None, count=1)))  # what requests need is measured by then
        plain, drafted, headed = (engine.memory.need(asked(1, how), "full") for how in (None, "draft", "mtp"))
    tokens = 90 + COUNT + KVCache.step
    assert drafted.held - plain.held == drafts * tokens
    assert headed.held - plain.held == entry * tokens
