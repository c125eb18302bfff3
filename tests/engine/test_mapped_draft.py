"""A draft with another tokenizer: what it finds, in the target's tokens; and all that a pair can do with it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from fractions import Fraction
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer

from mlx_specprefill import (
    DraftHeads,
    Engine,
    EngineConfig,
    GenerationRequest,
    PairMismatchError,
    PromptSpan,
    ScoringConfig,
    SparseUnsupportedError,
    SpecPrefillOptions,
    make_pair,
    with_heads,
)
from mlx_specprefill.engine.reading import scoring
from mlx_specprefill.selection.heads import Head
from mlx_specprefill.selection.mapped import map_task
from mlx_specprefill.selection.scorer import HeadScorer, PaperScorer
from tests.support.precision import assert_close, numbers
from tests.support.scoring import scoring_input
from tests.support.steps import finish
from tests.support.tiny import generated, tiny_model
from tests.support.tiny import tokenizer as words
from tests.support.tokenizers_of_all_kinds import kind, wrapped

MERGES = 300
VOCAB = 256 + MERGES + 2
HEADS = DraftHeads((Head(1, 0, 0.6), Head(2, 3, 0.4)), 3, 3, {"copy": 1.0})
TEXT = "The secret code for Anna is 471128. Nobody knows it, but it's written: naïve 中文 text 🙂.\n" * 4
ASKED = "What is the code for Anna?"
FORCED = SpecPrefillOptions(enabled=True, keep_pct=Fraction(1, 4))
CONFIG = {"max_position_embeddings": 4096, "vocab_size": VOCAB}


def target_tokenizer():
    return kind("byte-level")


def permuted():
    """The target's tokenizer with other ids: tokenizer, and the new id of each old one."""
    state = json.loads(target_tokenizer().backend_tokenizer.to_str())
    size = len(state["model"]["vocab"])
    new = np.random.default_rng(3).permutation(size)
    state["model"]["vocab"] = {token: int(new[old]) for token, old in state["model"]["vocab"].items()}
    ids = np.append(new, np.arange(size, VOCAB))
    return wrapped(Tokenizer.from_str(json.dumps(state)), eos_token="<|im_end|>"), ids


def without_merges():
    """The target's vocabulary, of which texts take the single bytes alone."""
    state = json.loads(target_tokenizer().backend_tokenizer.to_str())
    state["model"]["merges"] = []
    return wrapped(Tokenizer.from_str(json.dumps(state)), eos_token="<|im_end|>")


def model(seed=1):
    return tiny_model("llama", seed=seed, vocab_size=VOCAB)


def behind(ids):
    """The target's weights behind another numbering of the vocabulary."""
    draft = model()
    for layer in (draft.model.embed_tokens, draft.lm_head):
        weight = numbers(layer.weight)
        moved = np.empty_like(weight)
        moved[ids] = weight
        layer.weight = mx.array(moved).astype(layer.weight.dtype)
    return draft


def pair(draft=None, tokenizer=None, heads=HEADS, **more):
    made = make_pair(
        model(), target_tokenizer(), CONFIG, draft=draft or model(), draft_config=CONFIG, draft_tokenizer=tokenizer
    )
    made = made if heads is None else with_heads(made, heads)
    return replace(made, **more)


def tokens_of(text=TEXT + ASKED, tokenizer=None):
    return np.array((tokenizer or target_tokenizer()).encode(text, add_special_tokens=False), dtype=np.int32)


def importance(of, prompt, spans=(), **options):
    with Engine(of, EngineConfig()) as engine:
        chosen = SpecPrefillOptions(enabled=True, keep_pct=Fraction(1, 4), **options)
        return engine.inspect(GenerationRequest(prompt, 1, specprefill=chosen, spans=spans)).importance


@pytest.mark.parametrize("rule", ["default", "paper"])
def test_the_targets_weights_behind_a_permuted_vocabulary_find_the_same(rule):
    tokenizer, ids = permuted()
    mapped = pair(behind(ids), tokenizer)
    assert (mapped.mapping.aligned, mapped.mapping.ratio) == (1, 1)
    direct = importance(pair(), tokens_of(), rule=rule)
    assert direct.max() > 0
    assert importance(mapped, tokens_of(), rule=rule).tolist() == direct.tolist()


def test_behind_a_tools_result_a_draft_with_other_ids_asks_the_same():
    tokenizer, ids = permuted()
    prompt = tokens_of()
    ends = [0, prompt.size // 4, prompt.size // 3, prompt.size]
    spans = tuple(
        PromptSpan(*one)
        for one in zip(("user", "assistant", "tool"), ends[:-1], ends[:-1], ends[1:], ends[1:], strict=True)
    )
    direct = importance(pair(), prompt, spans)
    assert importance(pair(behind(ids), tokenizer), prompt, spans).tolist() == direct.tolist()
    assert direct.tolist() != importance(pair(), prompt).tolist()


@pytest.mark.parametrize("scorer", [HeadScorer(HEADS, ScoringConfig()), PaperScorer(ScoringConfig())])
def test_a_token_has_the_most_that_one_of_its_bytes_has(scorer):
    """By definition, byte by byte: question, template and importance."""
    draft, prompt, data = model(), tokens_of(), (TEXT + ASKED).encode()
    lengths = [len(kind("byte-level").decode([int(token)]).encode()) for token in prompt]
    assert "\ufffd" not in "".join(kind("byte-level").decode([int(token)]) for token in prompt)
    owner = np.repeat(np.arange(prompt.size), lengths)
    template = np.zeros(prompt.size, dtype=np.bool_)
    template[[0, 1, 2, -1]] = True
    start = prompt.size - 5
    mapping = pair(tokenizer=without_merges()).mapping
    given = {"question": (start, prompt.size), "template": template}
    mapped = map_task(mapping, scoring_input(draft, prompt, ScoringConfig(), **given))
    found = mapped.scores(finish(scorer.score(draft, mapped.task)))

    asked = np.flatnonzero(owner == start)[0]
    in_bytes = {"question": (int(asked), len(data)), "template": template[owner]}
    stops = frozenset(kind("byte-level").eos_token_ids)
    task = scoring_input(draft, tokens_of(tokenizer=without_merges()), ScoringConfig(), stop_ids=stops, **in_bytes)
    direct = finish(scorer.score(draft, task)).importance
    assert direct.size == len(data) > prompt.size
    assert found.importance.tolist() == [direct[owner == token].max() for token in range(prompt.size)]
    assert (found.scorer, found.lookahead, found.cache) == ("mapped-draft", (), [])


@pytest.mark.parametrize("in_bytes", [False, True])
def test_questions_behind_the_prompt_look_at_the_same_places(in_bytes):
    """A draft with other ids looks where the same weights do, and one that reads bytes at the token of those bytes."""
    tokenizer, ids = (without_merges(), None) if in_bytes else permuted()
    draft = model() if in_bytes else behind(ids)
    text, asked = TEXT.replace("🙂", ""), (ASKED, "Nobody knows what?")
    prompt, read = tokens_of(text), tokens_of(text, tokenizer)
    questions, config = tuple(map(tokens_of, asked)), ScoringConfig()
    template = np.arange(prompt.size) < 1
    task = scoring_input(draft, prompt, config, questions=questions, template=template)
    mapped = map_task(pair(draft, tokenizer).mapping, task)
    scorer = HeadScorer(HEADS, config)
    found = mapped.scores(finish(scorer.score(draft, mapped.task)))
    in_its_tokens = tuple(tokens_of(one, tokenizer) for one in asked)
    own = {"questions": in_its_tokens, "template": mapped.task.template}
    direct = finish(scorer.score(draft, scoring_input(draft, read, config, **own)))
    lengths = [len(target_tokenizer().decode([int(token)]).encode()) for token in prompt]
    owner = np.repeat(np.arange(prompt.size), lengths) if in_bytes else np.arange(prompt.size)
    assert found.places.tolist() == owner[direct.places].tolist()
    assert found.importance.max() == direct.importance.max() == 1
    assert found.words.endswith("mapped by text")


@pytest.fixture(scope="module")
def mapped():
    """A pair whose draft is another model with another kind of tokenizer."""
    tokenizer = kind("llama 2")
    draft = tiny_model("qwen3", seed=5, vocab_size=len(tokenizer))
    made = make_pair(model(), target_tokenizer(), CONFIG, draft=draft, draft_config=CONFIG, draft_tokenizer=tokenizer)
    return with_heads(made, HEADS)


def conversation(*texts):
    """A prompt of messages, each in special tokens of the target's, and where they lie."""
    tokens, spans, tokenizer = list[Any](), list[Any](), target_tokenizer()
    for number, text in enumerate(texts):
        start = len(tokens)
        role = "user" if number % 2 == 0 else "assistant"
        tokens += tokenizer.encode(f"<|im_start|>{role}\n")
        content = len(tokens)
        tokens += tokenizer.encode(text, add_special_tokens=False)
        end = len(tokens)
        tokens += tokenizer.encode("<|im_end|>\n")
        spans.append(PromptSpan(role, start, content, end, len(tokens)))
    return {"prompt": tokens + tokenizer.encode("<|im_start|>assistant\n"), "spans": tuple(spans)}


def run(engine, **given):
    tokens, last = generated(engine.generate(GenerationRequest(**{"max_tokens": 4, "specprefill": FORCED, **given})))
    return tokens, last.report


def test_a_sparse_chat_and_its_next_turn(mapped):
    first = conversation(TEXT * 3 + ASKED)
    with Engine(mapped, EngineConfig(max_rows=2)) as engine:
        answer, report = run(engine, **first)
        said = target_tokenizer().decode(answer)
        second = conversation(TEXT * 3 + ASKED, said, "And who knows it? " + TEXT + ASKED)
        _, later = run(engine, **second)
    for each in (report, later):
        assert (each.mode, each.scorer) == ("sparse", "mapped-draft")
        assert each.scoring.startswith("2 calibrated heads, 3 of 3 layers, ")
        assert each.scoring.endswith(", mapped by text")
        assert each.to_dict()["scorer"] == "mapped-draft"
        assert 0 < each.kept_tokens < each.prompt_tokens
    assert later.cached_tokens > 0


def test_a_cached_prefix_of_the_drafts_own_tokens_changes_no_score(mapped):
    """Two prompts with one beginning; then one whose tokens are the same to the target, but other ones to the draft."""
    prompts = [conversation(TEXT * 3 + ASKED), conversation(TEXT * 3 + "Who is it written for? " + ASKED)]
    prompts.append(conversation("!" + TEXT * 3 + ASKED))
    alone = []
    for given in prompts:
        with Engine(mapped) as engine:
            alone.append(engine.inspect(GenerationRequest(max_tokens=1, specprefill=FORCED, **given)).importance)
    with Engine(mapped) as engine:
        for given, expected in zip(prompts * 2, alone * 2, strict=True):
            read: list[Any] = []
            request = GenerationRequest(max_tokens=1, specprefill=FORCED, **given)
            found = engine.inspect(request, lambda event, read=read: read.append(event))
            assert_close(found.importance, expected, rtol=1e-3, atol=1e-6)
        kept = [entry for entry in engine.cached() if entry.kind == "draft"]
    assert kept
    assert max(entry.tokens for entry in kept) != len(prompts[0]["prompt"])  # the draft's tokens, not the target's


def test_what_the_draft_cannot_read_falls_back(mapped, monkeypatch):
    def broken(*_):
        raise RuntimeError("no scorer")

    monkeypatch.setattr(scoring, "map_task", broken)
    with Engine(mapped) as engine:
        _, report = run(engine, **conversation(TEXT + ASKED))
        assert engine.prefiller.fallbacks == {"draft": 1}
    assert (report.mode, report.scorer) == ("full", None)
    assert report.reason.startswith("fallback: draft failed: RuntimeError")


def test_the_drafts_context_counts_its_own_tokens(mapped):
    given = conversation(TEXT + ASKED)
    size = mapped.mapping.read(np.array(given["prompt"], dtype=np.int32)).tokens.size
    assert size != len(given["prompt"])
    for context, mode in ((size, "sparse"), (size - 1, "full")):
        with Engine(replace(mapped, draft_context=context)) as engine:
            _, report = run(engine, **given)
        assert report.mode == mode
    assert report.reason == f"the prompt has {size} tokens of the draft's, the draft's context {size - 1}"
    assert report.scorer is None
    with (
        Engine(replace(mapped, draft_context=size - 1)) as engine,
        pytest.raises(SparseUnsupportedError, match="tokens of the draft's"),
    ):
        engine.inspect(GenerationRequest(max_tokens=1, specprefill=FORCED, **given))


def test_own_scores_need_no_mapping(mapped, monkeypatch):
    monkeypatch.setattr(scoring, "map_task", None)
    given = conversation(TEXT + ASKED)
    own = SpecPrefillOptions(True, Fraction(1, 4), importance=np.ones(len(given["prompt"]), dtype=np.float32))
    with Engine(replace(mapped, draft_context=1)) as engine:
        _, report = run(engine, **{**given, "specprefill": own})
    assert (report.mode, report.scorer) == ("sparse", "request")


@pytest.mark.parametrize(("asked", "ran"), [("draft", False), ("triforce", False), ("ngram", True)])
def test_a_mapped_draft_proposes_nothing(mapped, asked, ran):
    options = replace(FORCED, speculative=asked)
    with Engine(mapped) as engine:
        tokens, report = run(engine, **conversation(TEXT + ASKED), specprefill=options)
        plain, _ = run(engine, **conversation(TEXT + ASKED))
    assert tokens == plain
    speculation = report.speculation
    assert (speculation.strategy == asked) == ran
    if not ran:
        assert "another tokenizer" in speculation.reason


def test_a_pair_says_how_its_tokens_meet(mapped, caplog):
    assert mapped.mapping.aligned > 0.999
    with caplog.at_level(logging.INFO):
        assert pair(tokenizer=target_tokenizer()).mapping is None
        assert pair(tokenizer=without_merges()).mapping is not None
    assert "draft draft: same tokenizer as the target's" in caplog.text
    assert "draft draft: mapped by text, 1.0000 of the characters aligned: " in caplog.text
    with pytest.raises(PairMismatchError, match=r"different vocabularies .*can't be mapped by text"):
        pair(tokenizer=words())
