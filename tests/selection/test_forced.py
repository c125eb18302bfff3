"""Tokens that are kept whatever the draft's scores are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_specprefill import PromptSpan, SelectionConfig
from mlx_specprefill.selection.plan import forced_mask, forced_ranges, template_mask

CONFIG = SelectionConfig()


def kept(spans, M, config=CONFIG):
    return forced_mask(forced_ranges(spans, M, config), M)


def message(kind, start, length, header=4, end=2):
    """Header, content of `length` tokens, end-of-turn."""
    first = start + header
    return PromptSpan(kind, start, first, first + length, first + length + end)


def test_template_structure_is_kept():
    system = message("system", 0, 100)
    user = message("user", system.end, 6000)
    assistant = message("assistant", user.end, 300)
    question = message("user", assistant.end, 3000)
    M = question.end + 3  # the generation prompt
    mask = kept([system, user, assistant, question], M)
    for span in (system, user, assistant, question):
        assert mask[span.start : span.content_start].all()
        assert mask[span.content_end : span.end].all()
    assert mask[question.end :].all()
    assert mask[: CONFIG.chunk_size].all()
    assert mask[system.content_start : system.content_end].all()
    assert not mask[user.content_start : user.content_end].any()
    assert not mask[assistant.content_start : assistant.content_end].any()


def test_the_frame_is_the_template_and_the_question():
    """Not the rest of what is forced: a line that begins there goes on where the choice begins."""
    system = message("system", 0, 20)
    user = message("user", system.end, 3000)
    M = user.end + 3  # the generation prompt
    asks = (user.content_end - 30, user.content_end)
    expected = np.zeros(M, dtype=np.bool_)
    expected[0] = True
    for span in (system, user):
        expected[span.start : span.content_start] = expected[span.content_end : span.end] = True
    expected[asks[0] :] = True
    frame = template_mask([system, user], asks, kept([system, user], M))
    np.testing.assert_array_equal(frame, expected)


def test_a_short_last_user_message_is_kept_whole():
    document = message("user", 0, 9000)
    question = message("user", document.end, 1000)
    M = question.end + 3
    assert M // 8 >= 1000
    assert kept([document, question], M)[question.start :].all()


def test_of_a_long_last_user_message_both_ends_are_kept():
    """min(128, M/64) tokens of its head and min(512, M/16) of its tail; the document between stays open."""
    M = 6400
    user = PromptSpan("user", 0, 4, M - 5, M - 3)
    mask = kept([user], M)
    content = mask[user.content_start : user.content_end]
    assert content[: M // 64].all()
    assert content[-(M // 16) :].all()
    assert not content[CONFIG.chunk_size + M // 64 : -(M // 16) - 1].any()


def test_system_prompt_and_tools_are_verbatim_up_to_the_limit():
    config = SelectionConfig(verbatim_system_limit=500)
    system, tools = message("system", 0, 300), message("tools", 306, 400)
    user = message("user", tools.end, 5000)
    mask = kept([system, tools, user], user.end + 3, config)
    assert mask[system.content_start : system.content_end].all()
    assert mask[tools.content_start : tools.content_start + 200].all()
    assert not mask[tools.content_start + 200 : tools.content_end].any()


def test_tool_results_after_the_question_keep_their_ends():
    question = message("user", 0, 50)
    call = message("assistant", question.end, 30)
    result = message("tool", call.end, 8000)
    M = result.end + 3
    mask = kept([question, call, result], M)
    assert mask[: call.end].all()
    content = mask[result.content_start : result.content_end]
    assert content[:64].all()
    assert content[-128:].all()
    assert not content[64:-128].any()


@st.composite
def conversations(draw):
    spans, at = [], draw(st.integers(0, 5))
    for kind in draw(st.lists(st.sampled_from(["system", "tools", "user", "assistant", "tool", "other"]), max_size=6)):
        span = message(kind, at, draw(st.integers(0, 400)), draw(st.integers(0, 5)), draw(st.integers(0, 3)))
        spans.append(span)
        at = span.end + draw(st.integers(0, 2))
    return spans, max(1, at + draw(st.integers(0, 4)))


@given(conversations())
def test_ranges_lie_in_the_prompt_and_hold_its_last_token(case):
    spans, M = case
    ranges = forced_ranges(spans, M, CONFIG)
    assert all(0 <= r.start < r.end <= M for r in ranges)
    mask = forced_mask(ranges, M)
    assert mask[M - 1]
    assert mask[: min(M, CONFIG.chunk_size)].all()
    if spans:
        assert mask[spans[-1].end :].all()
        assert np.all([mask[s.start : s.content_start].all() for s in spans])


def test_spans_must_be_ordered():
    with pytest.raises(ValueError, match="ordered"):
        PromptSpan("user", 5, 4, 6, 7)


def agent(system=3000, results=(900,) * 8):
    """An agent's request: a system message, a short order, calls and their results. Spans and prompt length."""
    first = message("system", 0, system)
    spans = [first, message("user", first.end, 40)]
    for length in results:
        spans.append(message("assistant", spans[-1].end, 30))
        spans.append(message("tool", spans[-1].end, length))
    return spans, spans[-1].end + 3


def dropped(spans, M, scope):
    """Return the tokens open to selection, as ranges of indices."""
    mask = forced_mask(forced_ranges(spans, M, CONFIG, scope), M)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], ~mask, [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def test_scope_all_opens_a_system_message_but_for_its_ends():
    spans, M = agent(results=())
    start, end = spans[0].content_start, spans[0].content_end
    assert dropped(spans, M, "user") == []
    assert dropped(spans, M, "all") == [(start + 256, end - 256)]


@pytest.mark.parametrize("scope", ["user", "all"])
def test_short_system_messages_and_tool_definitions_are_whole_in_either_scope(scope):
    short, tools = message("system", 0, 512), message("tools", 518, 4000)
    order = message("user", tools.end, 40)
    assert dropped([short, tools, order], order.end + 3, scope) == []


def test_of_many_tool_results_only_the_newest_are_kept_whole():
    """One order, then call after call: forced as a whole they would leave nothing to choose."""
    spans, M = agent(system=100)
    mask = kept(spans, M)
    results = [span for span in spans if span.kind == "tool"]
    whole = [bool(mask[span.content_start : span.content_end].all()) for span in results]
    assert M // 8 < 2 * 900
    assert whole == [False] * 7 + [True]
    for span in results[:-1]:
        assert mask[span.content_start : span.content_start + 64].all()
        assert mask[span.content_end - 128 : span.content_end].all()
        assert not mask[span.content_start + 64 : span.content_end - 128].any()
    assert all(mask[span.start : span.end].all() for span in spans if span.kind == "assistant")


def own_words(*lengths):
    """Return of which of the model's messages all is kept; user and model by turns, contents of so many tokens."""
    spans = list[PromptSpan]()
    for i, length in enumerate(lengths):
        spans.append(message(("user", "assistant")[i % 2], spans[-1].end if spans else 0, length))
    M = spans[-1].end + 3
    mask = kept(spans, M)
    return [bool(mask[span.content_start : span.content_end].all()) for span in spans[1::2]], M


def test_what_the_model_said_and_called_is_kept_if_short():
    """A sixteenth of the prompt, the newest first: behind a new question an agent still knows its paths."""
    assert own_words(300, 60, 2000, 65, 2000, 60, 1000, 300, 20)[0] == [True, False, True, False]
    whole, M = own_words(30, *[50, 300] * 20, 50, 20)
    most = M // 16 // 50
    assert whole == [False] * (21 - most) + [True] * most
