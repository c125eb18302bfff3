"""The target's own first layers score a prompt, and the others go on from there with what is kept."""

from __future__ import annotations

import math
from dataclasses import replace
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
    SpeculationConfig,
    SpeculationName,
    TokenEvent,
    make_pair,
)
from mlx_specprefill.adapters.depth import FirstLayers
from mlx_specprefill.adapters.heads import DraftHeads, Head
from mlx_specprefill.adapters.staged import StagedModel
from mlx_specprefill.cache.positioned import leaves, make_positioned_cache
from mlx_specprefill.engine import loop
from mlx_specprefill.engine.decode_batch import DecodeBatch, DecodeRow
from mlx_specprefill.errors import Refused
from mlx_specprefill.sampling import greedy
from mlx_specprefill.specprefill.sparse_prefill import HiddenStates, UpperLayersModel
from tests.support import precision
from tests.support.oracle import Case, build, make_case, vocabulary
from tests.support.precision import near_ties
from tests.support.rows import alone, logprob_error, make_rows, prefilled
from tests.support.rows import tokens as tokens_of
from tests.support.staged_oracle import deep_enough, masked_from, splits
from tests.support.steps import finish, prefill
from tests.support.tiny import (
    FAMILIES,
    VOCAB,
    generated,
    on_own_layers,
    random_prompt,
    tiny_head,
    tiny_model,
    tokenizer,
)
from tests.support.tiny import greedy as greedy_tokens
from tests.support.waiting import eventually

CONFIG = EngineConfig(policy=SpecPrefillPolicy(threshold=0, densify=False), prefill_step=32, prefix_cache_bytes=0)
COUNT = 12
SEEING = {"llama": 0, "qwen3": 0, "qwen3_5": 0, "nemotron_h": 0, "gpt_oss": 1}  # an attention call that sees all
OFF = SpecPrefillOptions(enabled=False, return_spans=True)


def own_pair(family: str = "llama", count: int = 2, **changes: Any) -> ModelPair:
    config = {"max_position_embeddings": 4096, "vocab_size": VOCAB}
    return on_own_layers(make_pair(tiny_model(family, 1, **changes), tokenizer(), config), count)


def asked(length: int = 200, seed: int = 0, **options: Any) -> GenerationRequest:
    how = SpecPrefillOptions(**({"enabled": True, "return_spans": True} | options))
    return GenerationRequest(random_prompt(length, seed), COUNT, specprefill=how)


def kept_of(last: Any) -> np.ndarray:
    return np.concatenate([np.arange(start, end) for start, end in last.report.kept_spans]).astype(np.int32)


def assert_is_the_masked_run(pair: ModelPair, request: GenerationRequest, tokens: list[int], last: Any) -> None:
    """Every token is what the target chooses in whose upper layers the dropped tokens are masked."""
    assert pair.stages is not None
    case = Case(np.asarray(request.prompt, dtype=np.int32), kept_of(last), np.array(tokens[:-1], dtype=np.int32))
    truth = masked_from(pair.target, case, pair.stages.count)
    assert truth.argmax(axis=-1).tolist() == tokens


# --- the engine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_that_of_a_run_masked_from_the_first_layers_on(family: str) -> None:
    pair = own_pair(family)
    assert pair.stages is not None, pair.staged
    with Engine(pair, CONFIG) as engine:
        tokens, last = generated(engine.generate(asked()))
        assert engine.stats().fallbacks == {}
    assert isinstance(last, Finished)
    assert last.report.mode == "sparse"
    assert last.report.scorer == "self"
    assert 0 < last.report.kept_tokens < 120
    assert_is_the_masked_run(pair, asked(), tokens, last)


@pytest.mark.parametrize("family", FAMILIES)
def test_lines_that_may_ask_leave_nothing_in_the_first_layers(family: str) -> None:
    """A message a turn before asks as well: it is read again behind the prompt, and the answer is the masked run."""
    pair = own_pair(family)
    heads = DraftHeads((Head(SEEING[family], 0, 1.0),), 2, 4, {})
    spans = (PromptSpan("user", 0, 2, 40, 42), PromptSpan("user", 42, 44, 198, 199))
    request = replace(asked(), spans=spans)
    with Engine(replace(pair, heads=heads), CONFIG) as engine:
        tokens, last = generated(engine.generate(request))
        assert engine.stats().fallbacks == {}
    assert last.report.scoring.endswith("1 more lines that may ask")
    assert_is_the_masked_run(pair, request, tokens, last)


def test_the_first_layers_read_the_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = own_pair()
    read, calls = [], type(pair.draft).__call__

    def counting(module: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        read.append(inputs.shape)
        return calls(module, inputs, cache)

    monkeypatch.setattr(type(pair.draft), "__call__", counting)
    with Engine(pair, CONFIG) as engine:
        read.clear()
        tokens, _ = generated(engine.generate(asked()))
    prompt = [length for _, length in read if length > 1]
    assert sum(prompt) in (199, 200)  # the last token may come alone
    assert len([1 for _, length in read if length == 1]) <= len(tokens) + 1


def test_dense_answers_are_those_of_the_target_alone() -> None:
    pair, request = own_pair(), asked(enabled=False)
    with Engine(pair, CONFIG) as engine:
        tokens, _ = generated(engine.generate(request))
    with Engine(replace(pair, draft=None, draft_id=None, staged=Refused("no draft")), CONFIG) as engine:
        assert generated(engine.generate(request))[0] == tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_all_kinds_answer_together_what_they_answer_alone(family: str) -> None:
    """Staged, sparse by own scores, and dense."""
    pair = own_pair(family)
    scores = np.random.default_rng(0).random(150).astype(np.float32)
    requests = [
        asked(200, 1),
        asked(90, 2, enabled=False),
        asked(150, 3, importance=scores),
        asked(260, 4),
        asked(40, 5, enabled=False),
    ]
    with Engine(pair, CONFIG) as engine:
        expected = [generated(engine.generate(request))[0] for request in requests]
        streams = [engine.generate(request) for request in requests]
        first = [next(stream) for stream in streams]
        assert len(first) == len(requests)
        assert [generated(stream)[0] for stream in streams] == expected


def test_the_papers_rule_reads_with_all_layers() -> None:
    """Its look-ahead needs them, so nothing is left for a second part."""
    pair = own_pair()
    with Engine(pair, CONFIG) as engine:
        _, last = generated(engine.generate(asked(rule="paper")))
    assert isinstance(last, Finished)
    assert last.report.mode == "sparse"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_drafted_by_ngrams_is_the_masked_run_too(family: str) -> None:
    """Tokens are taken back from layers that hold different numbers of them."""
    pair, request = own_pair(family), replace(asked(speculative="ngram"), max_tokens=40)
    with Engine(pair, replace(CONFIG, speculation=SpeculationConfig(ngram_match=1))) as engine:
        tokens, last = generated(engine.generate(request))
    assert isinstance(last, Finished)
    assert last.report.mode == "sparse"
    assert_is_the_masked_run(pair, request, tokens, last)
    assert last.report.speculation is not None
    assert last.report.speculation.strategy == "ngram"
    assert last.report.speculation.acceptance_rate is not None


def test_an_mtp_head_has_not_read_a_staged_prompt() -> None:
    pair = own_pair("qwen3_5")
    with Engine(replace(pair, own_parts={"mtp": tiny_head(pair.target)}), CONFIG) as engine:
        plain, _ = generated(engine.generate(asked()))
        tokens, last = generated(engine.generate(asked(speculative="mtp")))
    assert tokens == plain
    assert isinstance(last, Finished)
    assert last.report.mode == "sparse"
    assert last.report.speculation is not None
    assert last.report.speculation.strategy == "autoregressive"
    assert "does not read the prompt" in last.report.speculation.reason


def test_a_dense_prefix_is_not_read_again_by_the_upper_layers() -> None:
    pair, config = own_pair(), replace(CONFIG, prefix_cache_bytes=1 << 26)
    first = asked(300, 7, enabled=False)
    longer = replace(asked(472, 8, enabled=None), prompt=np.concatenate([first.prompt, random_prompt(172, 9)]))
    with Engine(pair, config) as engine:
        generated(engine.generate(first))
        tokens, last = generated(engine.generate(longer))
        again, same = generated(engine.generate(longer))
    assert isinstance(last, Finished)
    assert isinstance(same, Finished)
    assert last.report.cached_tokens >= 256
    assert kept_of(last)[: last.report.cached_tokens].tolist() == list(range(last.report.cached_tokens))
    assert_is_the_masked_run(pair, longer, tokens, last)
    assert tokens == again


@pytest.mark.extended
@pytest.mark.parametrize("family", FAMILIES)
def test_a_dense_request_finds_the_beginning_that_all_layers_have_read(family: str) -> None:
    """So does a staged one, whose first layers read no more than the rest, too."""
    pair, system = own_pair(family), random_prompt(200, 6)
    config = replace(CONFIG, policy=replace(CONFIG.policy, threshold=100), prefix_cache_bytes=1 << 26)

    def request(seed: int, enabled: bool | None) -> GenerationRequest:
        prompt = np.array([*system, *random_prompt(700, seed)], dtype=np.int32)
        spans = (PromptSpan("system", 0, 0, 200, 200), PromptSpan("user", 200, 200, 900, 900))
        return replace(asked(enabled=enabled), prompt=prompt, spans=spans)

    with Engine(pair, config) as engine:
        _, first = generated(engine.generate(request(1, None)))
        tokens, dense = generated(engine.generate(request(2, False)))
        answer, last = generated(engine.generate(request(3, None)))
        assert engine.stats().fallbacks == {}
    assert first.report.mode == last.report.mode == "sparse"
    assert 200 <= dense.report.cached_tokens < 256
    assert last.report.cached_tokens == dense.report.cached_tokens
    assert last.report.draft_tokens == 900 - last.report.cached_tokens
    assert tokens == greedy_tokens(pair.target, tuple(request(2, False).prompt.tolist()), COUNT)
    assert_is_the_masked_run(pair, request(3, None), answer, last)


@near_ties()
@pytest.mark.parametrize(
    ("family", "stands_out"), [*((family, math.inf) for family in FAMILIES), ("llama", 1.0), ("qwen3", 1.0)]
)
@pytest.mark.parametrize("how", ["off", pytest.param("ngram", marks=pytest.mark.extended)])
def test_a_conversation_goes_on_right(family: str, stands_out: float, how: SpeculationName) -> None:
    """Each token sees, in the upper layers, what was kept by the time it was fed; recalled ones what lies before."""
    config = replace(CONFIG, selection=SelectionConfig(stands_out=stands_out), prefix_cache_bytes=1 << 26)
    config = replace(config, speculation=SpeculationConfig(how, ngram_match=1))
    pair, turn = own_pair(family), asked(300, 3, enabled=None)
    with Engine(pair, config) as engine:
        tokens, first = generated(engine.generate(turn))
        prompt = np.concatenate([turn.prompt, tokens, random_prompt(90, 4)]).astype(np.int32)
        following = replace(turn, prompt=prompt)
        answer, last = generated(engine.generate(following))
        assert engine.stats().fallbacks == {}
    assert (last.report.recalled_tokens > 0) == (stands_out == 1.0)
    assert last.report.scorer == "self"
    turns = np.ones(prompt.size, dtype=np.int64)
    turns[kept_of(first)] = 0
    turns[turn.prompt.size : turn.prompt.size + len(tokens)] = 0
    assert last.report.cached_tokens == (turns == 0).sum()
    case = Case(prompt, kept_of(last), np.array(answer[:-1], dtype=np.int32), turns)
    before = Case(turn.prompt, kept_of(first), np.array(tokens, dtype=np.int32))
    assert pair.stages is not None
    assert masked_from(pair.target, case, pair.stages.count, before).argmax(axis=-1).tolist() == answer


@pytest.mark.parametrize(
    ("family", "stands_out"), [("llama", math.inf), ("llama", 1.0), ("gpt_oss", 1.0), ("qwen3_5", 1.0)]
)
def test_a_later_turn_is_read_once_by_the_first_layers(
    family: str, stands_out: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind what the draft's prefixes hold of the turn before; a retry reads next to nothing."""
    config = replace(CONFIG, selection=SelectionConfig(stands_out=stands_out), prefix_cache_bytes=1 << 26)
    pair, turn = own_pair(family), asked(600, 3, enabled=None)
    read, calls = [], FirstLayers.__call__

    def counting(module: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        read.append(inputs.shape[1])
        return calls(module, inputs, cache)

    monkeypatch.setattr(FirstLayers, "__call__", counting)
    with Engine(pair, config) as engine:
        prompt = turn.prompt
        for number in range(3):
            read.clear()
            answer, last = generated(engine.generate(replace(turn, prompt=prompt)))
            assert isinstance(last, Finished)
            report = last.report
            if number:
                assert sum(read) <= COUNT + 90 + COUNT + 50  # what asks is read anew
                assert report.kept_tokens - report.cached_tokens - report.recalled_tokens <= 90 + 1
            again, same = generated(engine.generate(replace(turn, prompt=prompt)))
            assert isinstance(same, Finished)
            assert again == answer
            assert same.report.kept_tokens - same.report.cached_tokens == 1
            prompt = np.concatenate([prompt, answer, random_prompt(90, 4 + number)]).astype(np.int32)
        assert engine.stats().fallbacks == {}


def test_own_scores_leave_no_turn_that_a_staged_one_goes_on_from() -> None:
    scores = np.random.default_rng(0).random(300).astype(np.float32)
    config = replace(CONFIG, prefix_cache_bytes=1 << 26)
    pair, turn = own_pair(), asked(300, 3, enabled=None)
    with Engine(pair, config) as engine:
        tokens, _ = generated(engine.generate(asked(300, 3, enabled=None, importance=scores)))
        prompt = np.concatenate([turn.prompt, tokens, random_prompt(90, 4)]).astype(np.int32)
        answer, last = generated(engine.generate(replace(turn, prompt=prompt)))
    assert last.report.cached_tokens == 0
    assert_is_the_masked_run(pair, replace(turn, prompt=prompt), answer, last)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.extended
def test_idle_time_makes_a_turn_dense(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every cache can be cut, all layers read the answer only, and the upper ones the prompt.

    Forwards of one token write the answer, and do not count.
    """
    monkeypatch.setattr(loop, "_QUIET_S", 0.0)
    policy = replace(CONFIG.policy, densify=True)
    pair, turn = own_pair(family), asked(600, 3, enabled=None)
    kind, read = type(pair.target), list[int]()
    calls = kind.__call__

    def counting(module: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        if module is pair.target:
            read.append(inputs.shape[1])
        return calls(module, inputs, cache=cache)

    with Engine(pair, replace(CONFIG, policy=policy, prefix_cache_bytes=1 << 26)) as engine:
        monkeypatch.setattr(kind, "__call__", counting)
        tokens, first = generated(engine.generate(turn))
        assert eventually(lambda: engine.stats().densified == 1)
        assert (sum(tokens for tokens in read if tokens > 1) <= COUNT) == (family == "llama")
        prompt = np.concatenate([turn.prompt, tokens, random_prompt(90, 4)]).astype(np.int32)
        full, dense = generated(engine.generate(replace(turn, prompt=prompt, specprefill=OFF)))
        answer, last = generated(engine.generate(replace(turn, prompt=prompt)))
        assert engine.stats().fallbacks == {}
    monkeypatch.undo()
    assert first.report.mode == "sparse"
    assert dense.report.cached_tokens >= 600 - 256
    assert full == greedy_tokens(pair.target, tuple(prompt.tolist()), COUNT)
    assert last.report.cached_tokens >= 600 - 256
    assert_is_the_masked_run(pair, replace(turn, prompt=prompt), answer, last)


def test_a_quantised_answer_is_that_of_a_run_masked_from_the_first_layers_on() -> None:
    pair, request = own_pair(head_dim=64, hidden_size=64), replace(asked(), logprobs=0)
    with Engine(pair, replace(CONFIG, kv_bits=4)) as engine:
        *events, last = [event for event in engine.generate(request) if isinstance(event, (TokenEvent, Finished))]
    tokens = [event.token for event in events]
    case = Case(np.asarray(request.prompt, dtype=np.int32), kept_of(last), np.array(tokens[:-1], dtype=np.int32))
    assert pair.stages is not None
    truth, plain = (masked_from(pair.target, case, pair.stages.count, kv_bits=bits) for bits in (4, None))
    assert truth.argmax(axis=-1).tolist() == tokens
    rows = truth - np.log(np.exp(truth).sum(axis=-1, keepdims=True))
    # A key that lies between two steps may be rounded the other way; all of them together are what it costs.
    ours = np.array([event.logprob for event in events])
    assert np.abs(ours - rows.max(axis=-1)).max() < 0.05 * np.abs(truth - plain)[1:].max()


def test_memory_is_predicted_for_what_the_first_layers_pass_on() -> None:
    pair = own_pair()
    with Engine(pair, CONFIG) as engine:
        sparse, full = (engine.memory.need(asked(400), mode) for mode in ("sparse", "full"))
    assert sparse.held - full.held == 400 * 48 * precision.dtype().size  # hidden size


# --- the batch -------------------------------------------------------------------------------------------------------


def staged_cache(split: StagedModel, case: Case, kept: np.ndarray) -> tuple[list[Any], mx.array]:
    cache = make_positioned_cache(split.whole)
    lower, upper = split.split(cache)
    hidden = HiddenStates()
    for start in range(0, case.prompt.size, 16):
        part = mx.array(case.prompt[start : start + 16])[None]
        hidden.keep(start, split.lower(part, cache=lower))
    kept = kept.astype(np.int32)
    logits = finish(prefill(UpperLayersModel(split.upper, hidden.of(kept)), upper, case.prompt, kept, 11))
    split.unite(cache, kept)
    return cache, logits


@near_ties()
@pytest.mark.parametrize("name", ["llama+window", "qwen3_moe", "gpt_oss", "gemma3_text", "nemotron_h", "deepseek_v3"])
def test_staged_rows_beside_dense_and_sparse_ones(name: str) -> None:
    """Six rows that join one after the other and leave at different steps; the oracle speaks for the staged ones."""
    model = deep_enough(name)
    split = StagedModel(model, splits(model)[0])
    others = make_rows(vocabulary(model), 4, seed=3)
    cases = [make_case(vocabulary(model), 0.4, 70, COUNT, 1), make_case(vocabulary(model), 0.3, 96, COUNT, 2)]
    batch, events = DecodeBatch(model), dict[int, list[Any]]()
    for step in range(COUNT + 6):
        if step < 4:
            cache, logits = prefilled(model, others[step])
            batch.add(DecodeRow(step, cache, logits, greedy, logprobs=3))
        if step in (1, 5):
            uid = 4 + step // 5
            cache, logits = staged_cache(split, cases[uid - 4], cases[uid - 4].kept)
            batch.add(DecodeRow(uid, cache, logits, greedy, logprobs=3))
        for uid, event in batch.step():
            events.setdefault(uid, []).append(event)
            if len(events[uid]) == COUNT:
                batch.remove(uid)
    assert len(batch) == 0
    for uid, row in enumerate(others):
        expected, _ = alone(model, row, COUNT)
        assert tokens_of(events[uid]) == tokens_of(expected)
        assert logprob_error(events[uid], expected) < 1e-4
    for uid, case in enumerate(cases, 4):
        following = np.array(tokens_of(events[uid])[:-1], dtype=np.int32)
        truth = masked_from(model, replace(case, continuation=following), split.count)
        assert truth.argmax(axis=-1).tolist() == tokens_of(events[uid])


def test_a_staged_row_that_leaves_is_as_it_was_alone() -> None:
    split = StagedModel(build("llama"), 2)
    cases = [make_case(vocabulary(split.whole), 0.4, 70, 0, seed) for seed in (1, 2)]
    batch = DecodeBatch(split.whole)
    for uid, case in enumerate(cases):
        batch.add(DecodeRow(uid, *staged_cache(split, case, case.kept), greedy))
    for _ in range(5):
        batch.step()
    left = batch.remove(0)
    cache, logits = staged_cache(split, cases[0], cases[0].kept)
    for token in left.tokens:
        assert int(logits.argmax(axis=-1).item()) == token
        logits = split.whole(mx.array([[token]]), cache=cache)[:, -1]
    assert [leaf.runs.pairs() for leaf in leaves(left.cache)] == [leaf.runs.pairs() for leaf in leaves(cache)]


# --- hidden states ---------------------------------------------------------------------------------------------------


def test_hidden_states_of_an_earlier_turn_are_kept_up_to_what_is_read_anew() -> None:
    states = mx.arange(60.0).reshape(1, 20, 3)
    late = HiddenStates(first=2, known=8, parts=[(2, states[:, 2:5]), (5, states[:, 5:10] + 0)])
    assert late.end == 10
    late.keep(8, states[:, 8:])
    kept = np.array([2, 7, 8, 9, 19], dtype=np.int32)
    assert late.covers(kept)
    assert not late.covers(np.array([1, 8], dtype=np.int32))
    assert mx.array_equal(late.of(kept), states[:, mx.array(kept)]).item()
    with pytest.raises(ValueError, match="not kept"):
        late.of(np.array([1], dtype=np.int32))
    assert late.of(kept[:0]).shape == (1, 0, 3)
    assert late.nbytes == 18 * 3 * 4
    for start, end, first, last in ((0, 4, 2, 4), (4, 9, 4, 9), (16, 24, 16, 20)):
        found = late.between(start, end)
        assert found is not None
        assert found[0] == first
        assert mx.array_equal(found[1], states[:, first:last]).item()
    assert late.between(0, 2) is None
    assert late.between(20, 24) is None


def test_hidden_states_are_found_by_index_across_forwards() -> None:
    states = mx.arange(60.0).reshape(1, 20, 3)
    hidden = HiddenStates(first=5)
    for start, end in ((0, 4), (4, 9), (9, 10), (10, 20)):
        hidden.keep(start, states[:, start:end])
    kept = np.array([5, 8, 9, 13, 19], dtype=np.int32)
    assert mx.array_equal(hidden.of(kept), states[:, mx.array(kept)]).item()
    assert hidden.nbytes == 15 * 3 * 4
