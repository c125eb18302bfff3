"""S1-S5: importance against brute force in float64, look-ahead bookkeeping, and an untouched draft."""

from __future__ import annotations

import copy
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill import ScoringConfig, SparseUnsupportedError
from mlx_specprefill.adapters.capture import QueryCapture, install_capture, pool
from mlx_specprefill.adapters.rope import install_rope
from mlx_specprefill.cache.positioned import leaves
from mlx_specprefill.prefill.scoring import question_span, score_prompt
from tests.tiny import FAMILIES, WINDOW, random_prompt, tiny_model

M = 90
MEAN_HEADS = ("gpt_oss", "nemotron_h", "qwen3_5")


def run(draft, prompt, config=None, stops=frozenset(), cache=None, question=None, frame=None):
    """Drive the generator to its result; also the number of yields."""
    config = config or ScoringConfig()
    steps, generator = 0, score_prompt(draft, prompt, config, stops, cache, question=question, frame=frame)
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
        calls.append([np.array(a, dtype=np.float64) if a is not None else None for a in (q, k, sinks)] + [scale])
        return original(q, k, v, scale=scale, mask=mask, sinks=sinks, **rest)

    mx.fast.scaled_dot_product_attention = recording
    try:
        logits = model(mx.array(tokens)[None])
        mx.eval(logits)
    finally:
        mx.fast.scaled_dot_product_attention = original
    return calls, np.array(logits[0])


def brute_force(model, family, prompt, config, question=(M - 17, M - 1), frame=None):
    """Look-ahead and question, each all rows of all layers without the frame, smoothed and joined: numpy float64."""
    counted = np.ones(M) if frame is None else 1.0 - frame
    join = {"max": np.max, "mean": np.mean}[config.heads or ("mean" if family in MEAN_HEADS else "max")]
    tokens = list(prompt)
    for _ in range(config.rows):
        tokens.append(int(np.argmax(attention_inputs(model, tokens)[1][-1])))
    calls, _ = attention_inputs(model, tokens)
    if family == "gpt_oss":
        calls = calls[1::2]  # the other layers have a window that is shorter than the prompt
    first = M - 1 if config.include_last_prompt_query else M
    heads = [(call, head) for call in calls for head in range(call[0].shape[1])]
    ahead = [
        join([smooth(attention_row(*at, row) * counted, config) for at in heads], axis=0)
        for row in range(first, first + config.rows)
    ]
    found = np.mean(ahead, axis=0)
    if question is not None:
        of_heads = [np.mean([attention_row(*at, row) for row in range(*question)], axis=0) for at in heads]
        question = join([smooth(row * counted, config) for row in of_heads], axis=0)
        part = config.question_share
        found = (1 - part) * found + part * question * found.sum() / question.sum()
    return found, tuple(tokens[M:])


def attention_row(call, head, row):
    """What one token sees of the prompt in one head, (M,)."""
    q, k, sinks, scale = call
    keys = min(row + 1, M)
    logits = scale * (k[0, head // (q.shape[1] // k.shape[1]), :keys] @ q[0, head, row])
    logits = np.append(logits, [sinks[head]] if sinks is not None else [])
    weights = np.exp(logits - logits.max())
    return np.pad(weights[:keys] / weights.sum(), (0, M - keys))


def smooth(row, config):
    return np.convolve(row, np.ones(config.pool_width), "same") / config.pool_width


@pytest.mark.parametrize(("include_last", "heads"), [(True, None), (True, "max"), (False, "mean")])
@pytest.mark.parametrize("family", FAMILIES)
def test_importance_equals_brute_force(family, include_last, heads):
    model, prompt = tiny_model(family, seed=3), random_prompt(M)
    config = ScoringConfig(
        rows=4, include_last_prompt_query=include_last, heads=heads, prefill_step=37, question_rows=(0, 0)
    )
    install_rope(), install_capture()
    scores, _ = run(model, prompt, config)
    expected, lookahead = brute_force(model, family, prompt, config, None)
    np.testing.assert_allclose(scores.importance, expected, rtol=1e-5, atol=1e-8)
    assert scores.rows == 4
    assert scores.lookahead == lookahead[:4]
    assert scores.importance.dtype == np.float32


@pytest.mark.parametrize("heads", ["max", "mean"])
@pytest.mark.parametrize("family", FAMILIES)
def test_question_rows_equal_brute_force(family, heads):
    """In one forward with other tokens before and after them, whose attention does not count."""
    model, prompt = tiny_model(family, seed=3), random_prompt(M)
    install_rope(), install_capture()
    for *question, step in (
        (M - 17, M - 1, 37),
        (M - 23, M - 7, 200),
        (M - 12, M - 7, 33),
        (0, M - 3, 50),
        (24, 40, 20),
    ):
        config = ScoringConfig(rows=2, heads=heads, prefill_step=step)
        scores, _ = run(model, prompt, config, question=question)
        expected, _ = brute_force(model, family, prompt, config, question)
        np.testing.assert_allclose(scores.importance, expected, rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize("heads", ["max", "mean"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_frame_gets_no_importance_and_lends_none(family, heads):
    """What it attracts is gone before it is smoothed over the tokens beside it and before the parts are weighed."""
    model, prompt = tiny_model(family, seed=3), random_prompt(M)
    install_rope(), install_capture()
    question, frame = (M - 23, M - 7), np.zeros(M, dtype=np.bool_)
    frame[0] = frame[30:34] = frame[M - 23 :] = True
    for share in (0.0, 0.5, 0.9):
        config = ScoringConfig(rows=2, heads=heads, prefill_step=37, question_share=share)
        scores, _ = run(model, prompt, config, question=question, frame=frame)
        expected, _ = brute_force(model, family, prompt, config, question, frame)
        np.testing.assert_allclose(scores.importance, expected, rtol=2e-5, atol=1e-8)
    assert scores.importance[M - 16 :].max() == 0  # the taps of a mean over 13 reach no counted token from here


def test_a_prompt_that_is_all_frame_has_no_importance():
    install_capture()
    scores, _ = run(tiny_model("llama"), random_prompt(M), question=(M - 17, M - 1), frame=np.ones(M, dtype=np.bool_))
    assert scores.importance.shape == (M,)
    assert not scores.importance.any()


def test_the_question_is_read_in_one_forward():
    draft = Counting(tiny_model("llama", seed=6))
    for step, end, shapes in (
        (40, M - 1, [40, 33, 16]),  # a step that would end within the question ends before it
        (40, M - 10, [40, 24, 25]),
        (80, M - 1, [73, 16]),
        (89, M - 1, [89]),
        (8, M - 1, [8] * 9 + [1, 16]),
    ):
        draft.shapes = []
        run(
            draft,
            random_prompt(M),
            ScoringConfig(prefill_step=step),
            cache=make_prompt_cache(draft.model),
            question=(end - 16, end),
        )
        assert draft.shapes == [*shapes, *[1] * 8], (step, end)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (8, 1), (8, 2)])
def test_query_groups(heads):
    H, H_kv = heads
    model = tiny_model(
        "llama", seed=4, num_attention_heads=H, num_key_value_heads=H_kv, head_dim=8, num_hidden_layers=1
    )
    config, prompt = ScoringConfig(rows=2), random_prompt(M, 1)
    expected, _ = brute_force(model, "llama", prompt, config)
    np.testing.assert_allclose(run(model, prompt, config)[0].importance, expected, rtol=1e-5, atol=1e-8)


def test_two_runs_are_identical():
    model, prompt = tiny_model("qwen3_5", seed=5), random_prompt(M)
    first, second = run(model, prompt)[0], run(model, prompt)[0]
    assert (first.importance == second.importance).all()
    assert first.lookahead == second.lookahead


def test_running_maximum_equals_the_monolithic_result_bit_for_bit():
    rng = np.random.default_rng(0)
    layers = [(mx.array(rng.normal(size=(1, 4, 1, 8))), mx.array(rng.normal(size=(1, 2, 50, 8)))) for _ in range(5)]
    layers = [(q.astype(mx.float32), k.astype(mx.float32)) for q, k in layers]
    capture, rows = QueryCapture(50, 13), []
    with capture.row(50):
        for q, k in layers:
            capture.observe(q, k, 0.5, None, None)
    for q, k in layers:
        logits = ((q * 0.5).reshape(1, 2, 2, 8) @ k.swapaxes(-1, -2)).reshape(4, 50)
        rows.append(pool(mx.softmax(logits, axis=-1), 13))
    assert (np.array(capture.rows[0]) == np.array(mx.concatenate(rows).max(axis=0))).all()


def test_edges_of_a_uniform_row_are_attenuated():
    row = pool(mx.full((1, M), 1 / M), 13)[0]
    np.testing.assert_allclose(np.array(row[6:-6]), 1 / M, rtol=1e-6)
    np.testing.assert_allclose(np.array(row)[[0, -1]], 7 / 13 / M, rtol=1e-6)


class Counting:
    """Counts the forwards of a draft after its prompt."""

    def __init__(self, model):
        self.model, self.shapes = model, []
        self.layers = model.layers

    def __call__(self, tokens, cache):
        self.shapes.append(tokens.shape[1])
        return self.model(tokens, cache=cache)


@pytest.mark.parametrize(("include_last", "forwards"), [(True, 7), (False, 8)])
def test_forwards_after_the_prompt(include_last, forwards):
    draft = Counting(tiny_model("llama", seed=6))
    config = ScoringConfig(include_last_prompt_query=include_last, prefill_step=40)
    scores, yields = run(draft, random_prompt(M), config, cache=make_prompt_cache(draft.model))
    assert draft.shapes == [40, 33, 16, 1] + [1] * forwards
    assert scores.rows == 8
    assert yields == 4


@pytest.mark.parametrize("step", [0, 2, 5])
def test_rows_after_the_end_of_the_answer_are_not_used(step):
    """The end comes out of step s: rows 0..s count."""
    model, prompt = tiny_model("qwen3", seed=7), random_prompt(M, 2)
    free, _ = run(model, prompt)
    stop = frozenset([free.lookahead[step]])
    first = free.lookahead.index(free.lookahead[step])
    ended, _ = run(model, prompt, stops=stop)
    assert ended.rows == first + 1
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
        assert (np.array(ours) == np.array(theirs)).all()


def test_permuting_heads_does_not_change_importance():
    """Rows of q, k, v and columns of o permuted together are the same model."""
    model = tiny_model("llama", seed=9, num_attention_heads=4, num_key_value_heads=4, head_dim=8)
    permuted = copy.deepcopy(model)
    order = np.array([2, 0, 3, 1])
    rows = (order[:, None] * 8 + np.arange(8)).reshape(-1)
    for layer in permuted.layers:
        attention = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(attention, name).weight = getattr(attention, name).weight[mx.array(rows)]
        attention.o_proj.weight = attention.o_proj.weight[:, mx.array(rows)]
    prompt = random_prompt(M, 4)
    np.testing.assert_allclose(
        run(permuted, prompt)[0].importance, run(model, prompt)[0].importance, rtol=1e-5, atol=1e-8
    )


def test_window_layers_do_not_count():
    """A layer that cannot see the prompt's start must not add its local attention to the maximum."""
    full = tiny_model("gpt_oss", seed=10)
    scores, _ = run(full, random_prompt(M, 5))
    assert scores.layers == 2  # of 4
    assert WINDOW < M


def test_a_draft_without_attention_is_refused():
    class Recurrent:
        def make_cache(self):
            return []

        def __call__(self, tokens, cache):
            return mx.zeros((*tokens.shape, 96))

    with pytest.raises(SparseUnsupportedError, match="sees the whole prompt"):
        run(Recurrent(), random_prompt(M, 6))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cached_prefix_does_not_change_the_scores(family):
    """S6: the draft's own dense prefix, then the rest, equals scoring the whole prompt cold."""
    model, prompt = tiny_model(family, seed=12), random_prompt(M, 7)
    cache = make_prompt_cache(model)
    model(mx.array(prompt[:50])[None], cache=cache)
    mx.eval([part.state for part in cache])
    warm, _ = run(model, prompt, cache=cache)
    cold, _ = run(model, prompt)
    np.testing.assert_allclose(warm.importance, cold.importance, rtol=1e-4, atol=1e-7)
    assert warm.lookahead == cold.lookahead


def test_nothing_is_captured_outside_a_row():
    model = tiny_model("llama", seed=13)
    capture = QueryCapture(M, 13)
    with capture.row(M):
        pass
    model(mx.array(random_prompt(M))[None])
    assert capture.rows == []


@pytest.mark.parametrize(
    "bad",
    [
        {"rows": 0},
        {"question_rows": (-1, 4)},
        {"question_rows": (8, 4)},
        {"question_share": -0.1},
        {"question_share": 1.1},
        {"pool_width": 12},
        {"pool_width": 0},
        {"prefill_step": 0},
    ],
)
def test_bad_configurations_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        ScoringConfig(**bad)


@pytest.mark.parametrize(
    ("begins", "end", "expected"),
    [
        ((0, 40, 60), 80, (60, 80)),  # the last line asks
        ((0, 40, 75), 80, (70, 80)),  # it is short: some of what stands before it
        ((0, 5), 80, (50, 80)),  # it is long: its end
        ((0, 40, 60, 80), 80, (60, 80)),  # what begins behind the message does not count
        ((0,), 6, (0, 6)),
        ((0, 85), None, (79, M - 1)),  # a prompt without messages
    ],
)
def test_the_last_line_asks(begins, end, expected):
    config = ScoringConfig(question_rows=(10, 30))
    assert question_span(M, config, end, np.array(begins, dtype=np.int32)) == expected


def test_a_question_may_be_switched_off():
    assert question_span(M, ScoringConfig(question_rows=(0, 0)), 80, np.array([0, 60], dtype=np.int32)) == (
        M - 1,
        M - 1,
    )
