"""S1-S5: importance against brute force in float64, look-ahead bookkeeping, and an untouched draft."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill import PromptSpan, ScoringConfig, SparseUnsupportedError
from mlx_specprefill.adapters.depth import first_layers
from mlx_specprefill.cache.positioned import leaves
from mlx_specprefill.errors import SpecPrefillError
from mlx_specprefill.selection import scorer as scoring
from mlx_specprefill.selection.heads import DraftHeads, Head
from mlx_specprefill.selection.question_lines import question_span, repeated_question_spans
from mlx_specprefill.selection.scorer import (
    AROUND,
    HeadScorer,
    PaperScorer,
    add_asks,
    scorer_for,
)
from tests.support.precision import assert_close, numbers
from tests.support.scoring import scoring_input
from tests.support.tiny import FAMILIES, random_prompt, tiny_model

M = 90
# Attention calls, in the order of a forward, that see the whole prompt: the first and the second of them.
SEEING = {"llama": (0, 2), "qwen3": (0, 2), "qwen3_5": (0, 1), "nemotron_h": (0, 1), "gpt_oss": (1, 3)}
QUESTION = (M - 23, M - 7)


def heads_of(family, depth=1, layers=1):
    """Three heads of two layers that see the prompt, weighed differently."""
    first, second = SEEING[family]
    return DraftHeads((Head(second, 3, 0.5), Head(first, 0, 0.25), Head(first, 1, 0.125)), depth, layers, {})


def run(draft, prompt, config=None, stops=frozenset(), **given):
    """Return the scores of the paper's scorer, and the number of yields."""
    config = config or ScoringConfig()
    return driven(PaperScorer(config), draft, scoring_input(draft, prompt, config, stop_ids=stops, **given))


def run_heads(draft, prompt, heads, config=None, question=QUESTION, **given):
    """The same with calibrated heads."""
    config = config or ScoringConfig()
    return driven(HeadScorer(heads, config), draft, scoring_input(draft, prompt, config, question=question, **given))


def driven(scorer, draft, task):
    steps, generator = 0, scorer.score(draft, task)
    while True:
        try:
            next(generator)
            steps += 1
        except StopIteration as done:
            return done.value, steps


def attention_inputs(model, tokens):
    """(queries, keys, scale, sinks) of every attention call of one dense forward, as float64."""
    calls, original = [], mx.fast.scaled_dot_product_attention

    def recording(q, k, v, *, scale, mask=None, sinks=None, **rest):
        calls.append([numbers(a).astype(np.float64) if a is not None else None for a in (q, k, sinks)] + [scale])
        return original(q, k, v, scale=scale, mask=mask, sinks=sinks, **rest)

    mx.fast.scaled_dot_product_attention = recording
    try:
        logits = model(mx.array(tokens)[None])
        mx.eval(logits)
    finally:
        mx.fast.scaled_dot_product_attention = original
    return calls, numbers(logits[0])


def whole_prompt_calls(family, calls):
    return calls[1::2] if family == "gpt_oss" else calls  # the others have a window that is shorter than the prompt


def brute_force(model, family, prompt, config):
    """The paper's rule: the mean over look-ahead rows of the maximum over smoothed heads, in numpy float64."""
    tokens = list(prompt)
    for _ in range(config.rows):
        tokens.append(int(np.argmax(attention_inputs(model, tokens)[1][-1])))
    calls = whole_prompt_calls(family, attention_inputs(model, tokens)[0])
    heads = [(call, head) for call in calls for head in range(call[0].shape[1])]
    rows = range(M - 1, M - 1 + config.rows)
    ahead = [np.max([smooth(attention_row(*at, row), config) for at in heads], axis=0) for row in rows]
    return np.mean(ahead, axis=0), tuple(tokens[M:])


def brute_force_of_heads(model, heads, prompt, config, question, template=None):
    """The weighted mean of the question's rows, each head by its own mass outside the template, smoothed: float64."""
    calls, _ = attention_inputs(model, prompt)
    importance = np.zeros(M)
    for head in heads.heads:
        row = np.mean([attention_row(calls[head.call], head.head, at) for at in range(*question)], axis=0)
        counted = row if template is None else np.where(template, 0.0, row)
        importance += head.weight * counted / counted.sum() if counted.sum() > 0 else 0.0
    return smooth(importance, config)


def attention_row(call, head, row):
    """Return one token's attention to the prompt in one head, (M,)."""
    q, k, sinks, scale = call
    keys = min(row + 1, M)
    logits = scale * (k[0, head // (q.shape[1] // k.shape[1]), :keys] @ q[0, head, row])
    logits = np.append(logits, [sinks[head]] if sinks is not None else [])
    weights = np.exp(logits - logits.max())
    return np.pad(weights[:keys] / weights.sum(), (0, M - keys))


def smooth(row, config):
    return np.convolve(row, np.ones(config.pool_width), "same") / config.pool_width


@pytest.mark.parametrize("family", FAMILIES)
def test_importance_equals_brute_force(family):
    model, prompt = tiny_model(family, seed=3), random_prompt(M)
    config = ScoringConfig(rows=4, prefill_step=37)
    scores, _ = run(model, prompt, config)
    expected, lookahead = brute_force(model, family, prompt, config)
    assert_close(scores.importance, expected, rtol=1e-5, atol=1e-8)
    assert scores.words.startswith("4 look-ahead rows")
    assert scores.lookahead == lookahead[:4]
    assert scores.importance.dtype == np.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_calibrated_heads_equal_brute_force(family):
    """In one forward with other tokens before and after the question, whose attention does not count."""
    model, prompt, heads = tiny_model(family, seed=3), random_prompt(M), heads_of(family)
    for *question, step in (
        (M - 17, M - 1, 37),
        (M - 23, M - 7, 200),
        (M - 12, M - 7, 33),
        (0, M - 3, 50),
        (24, 40, 20),
        (M - 1, M, 30),
    ):
        config = ScoringConfig(prefill_step=step)
        scores, _ = run_heads(model, prompt, heads, config, tuple(question))
        expected = brute_force_of_heads(model, heads, prompt, config, question)
        assert_close(scores.importance, expected, rtol=2e-5, atol=1e-8)
        assert scores.lookahead == ()
        assert scores.importance.dtype == np.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_gets_no_importance_and_lends_none(family):
    """Attention on the template is removed before smoothing over neighbouring tokens and weighing the heads."""
    model, prompt, heads = tiny_model(family, seed=3), random_prompt(M), heads_of(family)
    template = np.zeros(M, dtype=np.bool_)
    template[0] = template[30:34] = template[M - 23 :] = True
    config = ScoringConfig(prefill_step=37)
    scores, _ = run_heads(model, prompt, heads, config, template=template)
    expected = brute_force_of_heads(model, heads, prompt, config, QUESTION, template)
    assert_close(scores.importance, expected, rtol=2e-5, atol=1e-8)
    assert scores.importance[M - 16 :].max() == 0  # the taps of a mean over 13 reach no counted token from here
    assert np.isclose(scores.importance.sum(), 0.875, atol=0.1)  # but for the edges, the heads' weights


@pytest.mark.parametrize("family", FAMILIES)
def test_first_layers_score_as_the_whole_draft(family):
    """Bit for bit, where all heads lie in them."""
    whole, prompt = tiny_model(family, seed=3), random_prompt(M)
    first = SEEING[family][0]
    heads = DraftHeads((Head(first, 0, 0.5), Head(first, 2, 0.2)), 2, len(whole.layers), {})
    early, _ = run_heads(first_layers(whole, 2), prompt, heads, ScoringConfig(prefill_step=33))
    late, _ = run_heads(whole, prompt, heads, ScoringConfig(prefill_step=33))
    np.testing.assert_array_equal(early.importance, late.importance)
    assert early.words == late.words == f"2 calibrated heads, 2 of {len(whole.layers)} layers"


def test_heads_above_the_layers_that_run_are_refused():
    whole = tiny_model("llama", seed=3)
    with pytest.raises(SparseUnsupportedError, match="does not see the whole prompt"):
        run_heads(first_layers(whole, 2), random_prompt(M), heads_of("llama"))


def test_a_head_of_a_window_is_refused():
    heads = DraftHeads((Head(1, 0, 1.0), Head(0, 0, 1.0)), 2, 4, {})
    with pytest.raises(SparseUnsupportedError, match="does not see the whole prompt"):
        run_heads(tiny_model("gpt_oss"), random_prompt(M), heads, ScoringConfig(prefill_step=37))


def test_importance_that_is_not_finite_is_refused():
    model = tiny_model("llama", seed=3)
    model.layers[0].self_attn.q_proj.weight = model.layers[0].self_attn.q_proj.weight * mx.nan
    for scorer in (PaperScorer(ScoringConfig()), HeadScorer(heads_of("llama"), ScoringConfig())):
        with pytest.raises(SpecPrefillError, match="not finite"):
            driven(scorer, model, scoring_input(model, random_prompt(M), ScoringConfig()))


def test_which_scorer_a_rule_means():
    config, heads = ScoringConfig(), heads_of("llama")
    assert scorer_for("default", heads, config) == HeadScorer(heads, config)
    assert scorer_for("default", None, config) == PaperScorer(config)
    assert scorer_for("paper", heads, config) == PaperScorer(config)


@pytest.mark.parametrize("step", [0, 2, 5])
def test_rows_after_the_end_of_the_answer_are_not_used(step):
    """The end comes out of step s: rows 0..s count."""
    model, prompt = tiny_model("qwen3", seed=7), random_prompt(M, 2)
    free, _ = run(model, prompt)
    stop = frozenset([free.lookahead[step]])
    first = free.lookahead.index(free.lookahead[step])
    ended, _ = run(model, prompt, stops=stop)
    assert ended.words.startswith(f"{first + 1} look-ahead rows")
    assert ended.lookahead == free.lookahead[: first + 1]
    short, _ = run(model, prompt, ScoringConfig(rows=first + 1))
    np.testing.assert_array_equal(ended.importance, short.importance)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_draft_is_back_at_the_end_of_the_prompt(family):
    """Bit-equal state to a draft that only read the prompt, and the same continuation."""
    model, prompt = tiny_model(family, seed=8), random_prompt(M, 3)
    used, fresh = make_prompt_cache(model), make_prompt_cache(model)
    run(model, prompt, ScoringConfig(prefill_step=64), cache=used)
    for start, end in pairwise((0, 64, M - 1, M)):
        model(mx.array(prompt[start:end])[None], cache=fresh)
    for ours, theirs in zip(leaves(used), leaves(fresh), strict=True):
        assert getattr(ours, "offset", None) == getattr(theirs, "offset", None)
    for token in random_prompt(5, 9):
        ours = model(mx.array([[token]]), cache=used)
        theirs = model(mx.array([[token]]), cache=fresh)
        assert mx.array_equal(ours, theirs)


def test_a_draft_without_attention_is_refused():
    class Recurrent:
        def make_cache(self):
            return []

        def __call__(self, tokens, cache):
            return mx.zeros((*tokens.shape, 96))

    with pytest.raises(SparseUnsupportedError, match="no attention layer of the draft sees the whole prompt"):
        run(Recurrent(), random_prompt(M, 6))
    with pytest.raises(SparseUnsupportedError, match="does not see the whole prompt"):
        run_heads(Recurrent(), random_prompt(M, 6), heads_of("llama"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cached_prefix_does_not_change_the_scores(family):
    """S6: the draft's own dense prefix, then the rest, equals scoring the whole prompt cold."""
    model, prompt = tiny_model(family, seed=12), random_prompt(M, 7)
    cache = make_prompt_cache(model)
    model(mx.array(prompt[:50])[None], cache=cache)
    mx.eval([part.state for part in cache])
    warm, _ = run(model, prompt, cache=cache)
    cold, _ = run(model, prompt)
    assert_close(warm.importance, cold.importance, rtol=1e-4, atol=1e-7)
    assert warm.lookahead == cold.lookahead


@pytest.mark.parametrize("length", [1, 50, QUESTION[0]])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cached_prefix_does_not_change_what_calibrated_heads_find(family, length):
    """Up to the question's first token at most: what asks is read anew."""
    model, prompt, heads = tiny_model(family, seed=12), random_prompt(M, 7), heads_of(family)
    cache = make_prompt_cache(model)
    model(mx.array(prompt[:length])[None], cache=cache)
    mx.eval([part.state for part in cache])
    warm, _ = run_heads(model, prompt, heads, cache=cache)
    cold, _ = run_heads(model, prompt, heads)
    assert_close(warm.importance, cold.importance, rtol=1e-4, atol=1e-7)
    assert {part.offset for part in leaves(warm.cache) if hasattr(part, "offset")} == {M}
    assert warm.cache is cache


@pytest.mark.parametrize(
    ("begins", "end", "expected"),
    [
        ((0, 40, 60), 80, (60, 80)),  # the last line asks
        ((0, 40, 75), 80, (70, 80)),  # it is short: some of what stands before it
        ((0, 5), 80, (50, 80)),  # it is long: its end
        ((0, 40, 60, 80), 80, (60, 80)),  # what begins behind the message does not count
        ((0,), 6, (0, 6)),
        ((0, 85), None, (M - 10, M)),  # a prompt without messages
    ],
)
def test_the_last_line_asks(begins, end, expected):
    config = ScoringConfig(question_rows=(10, 30))
    assert question_span(M, config, end, np.array(begins, dtype=np.int32)) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_what_asks_again_counts_as_if_it_stood_behind_the_prompt(family):
    """The same attention as of a prompt that goes on with it; the cache is that of the prompt alone."""
    draft, prompt, heads = tiny_model(family), np.array(random_prompt(M), dtype=np.int32), heads_of(family)
    again = prompt[10:30]
    found, _ = run_heads(draft, prompt, heads, again=np.array([[10, 30]]))
    longer = np.concatenate([prompt, again])
    template = np.arange(longer.size) >= M
    expected, _ = run_heads(draft, longer, heads, question=(M, longer.size), template=template)
    assert_close(found.importance, expected.importance[:M], rtol=2e-4, atol=1e-7)
    assert found.importance.shape == (M,)
    plain = list(make_prompt_cache(draft))
    for start in range(0, M, M):
        draft(mx.array(prompt[start:])[None], cache=plain)
    following = mx.array([[5, 6, 7]])
    ours, theirs = draft(following, cache=found.cache), draft(following, cache=plain)
    assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_lines_that_may_ask_count_by_the_most_that_one_makes_of_a_token(family, monkeypatch):
    """As if they stood behind the prompt, each without its own surroundings; the cache is that of the prompt alone."""
    draft, prompt, heads = tiny_model(family), np.array(random_prompt(M), dtype=np.int32), heads_of(family)
    lines = np.array([[2, 9], [12, 15], [20, 26]])
    weights = np.array([3.0, 0.0, 1.5], dtype=np.float32)
    monkeypatch.setattr(scoring, "asked_lines", lambda *_: weights)
    found, _ = run_heads(draft, prompt, heads, lines=lines)
    monkeypatch.setattr(scoring, "asked_lines", lambda _, those, *__: np.zeros(len(those), dtype=np.float32))
    alone, _ = run_heads(draft, prompt, heads, lines=lines)
    tokens = [prompt[start:end] for start, end in lines[[0, 2]]]
    longer, at, most = np.concatenate([prompt, *tokens]), M, np.zeros(M, dtype=np.float32)
    indices = np.arange(longer.size)
    for (start, end), weight, part in zip(lines[[0, 2]], weights[[0, 2]], tokens, strict=True):
        template = (indices >= M) | (indices >= start - AROUND) & (indices < end + AROUND)
        one, _ = run_heads(draft, longer, heads, question=(at, at + part.size), template=template)
        most, at = np.maximum(most, weight * one.importance[:M]), at + part.size
    assert most.max() > 0
    assert_close(found.importance, alone.importance + most, rtol=5e-4, atol=1e-6)
    following, plain = mx.array([[5, 6, 7]]), list(make_prompt_cache(draft))
    draft(mx.array(prompt)[None], cache=plain)
    assert_close(draft(following, cache=found.cache), draft(following, cache=plain), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("seed", range(20))
def test_lines_without_a_mark_take_half_of_what_is_chosen_at_most(seed):
    """However strong they are, as where a text repeats itself; what they see nothing of is not raised."""
    rng = np.random.default_rng(seed)
    importance, asked = rng.random(300, dtype=np.float32), 100 * rng.random((3, 300), dtype=np.float32)
    asked[:, 200:] = 0
    found = add_asks(importance, asked, np.ones(3, dtype=np.float32))
    assert np.array_equal(found[200:], importance[200:])
    assert (found >= importance).all()
    for chosen in (3, 30, 90):
        best, own = np.argsort(-found)[:chosen], np.argsort(-importance)[:chosen]
        assert np.isin(best, own).sum() >= chosen // 2
        assert np.isin(np.argsort(-asked.max(axis=0))[: chosen // 2], best).all()


def spans_of(*kinds_and_lengths):
    spans, at = [], 0
    for kind, length in kinds_and_lengths:
        spans.append(PromptSpan(kind, at, at + 3, at + 3 + length, at + 5 + length))
        at = spans[-1].end
    return spans


def test_behind_tool_results_the_last_call_and_the_last_order_ask():
    spans = spans_of(("system", 20), ("user", 200), ("assistant", 100), ("tool", 30), ("assistant", 10), ("tool", 500))
    user, call = spans[1], spans[4]
    units = np.array([0, user.content_end - 20, user.content_end + 4], dtype=np.int32)
    assert repeated_question_spans(spans, ScoringConfig(), units).tolist() == [
        [call.start, call.content_start],
        [call.content_start, call.end],
        [user.start, user.content_start],
        [user.content_end - 20, user.end],
    ]
    long = spans_of(("user", 10), ("assistant", 100), ("tool", 9))
    assert repeated_question_spans(long, ScoringConfig(), units)[1].tolist() == [long[1].content_end - 48, long[1].end]


@pytest.mark.parametrize("kinds", [["user"], ["tool"], ["user", "tool", "user"], ["user", "tool", "assistant"], []])
def test_where_the_last_message_asks_itself_nothing_is_read_again(kinds):
    spans = spans_of(*((kind, 50) for kind in kinds))
    assert repeated_question_spans(spans, ScoringConfig(), np.array([0], dtype=np.int32)).size == 0
