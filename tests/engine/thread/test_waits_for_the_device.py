"""The host's waits for the device, each of which is a pause of the device, in the engine's own loop."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from benchmarks.harness.counts import count_steps, counted

from mlx_specprefill import (
    Engine,
    EngineConfig,
    Finished,
    GenerationRequest,
    ModelPair,
    Progress,
    SpecPrefillPolicy,
)
from mlx_specprefill.choosing.sampling import greedy
from mlx_specprefill.engine.decoding.decode_batch import DecodeBatch, DecodeRow
from mlx_specprefill.pair import with_heads
from mlx_specprefill.selection.heads import DraftHeads, Head
from tests.support.rows import make_rows, prefilled
from tests.support.tiny import VOCAB, random_prompt, tiny_model, tiny_pair

from ..test_mapped_draft import ASKED, TEXT, conversation
from ..test_mapped_draft import pair as mapped_pair
from ..test_own_layers import own_pair

MOST = {"draft": 2, "prefill": 2, "select": 2, "decode": 1}  # waits of one step


def test_every_kind_of_wait_is_counted() -> None:
    with counted() as counts:
        x = mx.array([1, 2]) + 1
        mx.async_eval(x)
        mx.eval(x)
        mx.synchronize()
        np.array(x)
        np.asarray(x)
        x.tolist()
        x[0].item()
        assert (int(x[0]), float(x[0]), bool(x[0])) == (2, 2.0, True)
        np.array([1])
    assert counts == {"queued": 1, "waits": 9}
    x.tolist()
    assert counts["waits"] == 9


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gpt_oss", "own layers"])
def test_the_host_waits_once_per_token_and_twice_per_prefill_chunk(family: str) -> None:
    """One answer and four at once are counted, after a full prefill and after a sparse one."""
    pair = own_pair() if family == "own layers" else tiny_pair(family)
    with Engine(pair, EngineConfig(prefill_step=64, prefix_cache_bytes=0)) as engine:
        steps = [step for sparse in (False, True) for rows in (1, 4) for step in count_steps(engine, sparse, rows)]
    counted_kinds = [(step["sparse"], step["rows"], step["step"]) for step in steps if step["step"] in MOST]
    both = [(sparse, rows, kind) for sparse in (False, True) for rows in (1, 4) for kind in ("prefill", "decode")]
    assert {*both, (True, 1, "draft"), (True, 4, "draft")} <= set(counted_kinds)
    assert [step for step in steps if step["waits"] > MOST.get(step["step"], np.inf)] == []
    assert {step["queued"] for step in steps if step["step"] == "decode"} == {1}


def sparse_run(pair: ModelPair, **given: Any) -> tuple[int, int, str]:
    """The waits of a request without prefix caches, how many chunks it read, and how it was scored."""
    config = EngineConfig(policy=SpecPrefillPolicy(threshold=0), prefill_step=64, prefix_cache_bytes=0)
    with Engine(pair, config) as engine, counted() as counts:
        events = list(engine.generate(GenerationRequest(max_tokens=1, **given)))
    chunks = [event for event in events if isinstance(event, Progress) and event.stage in ("draft", "prefill")]
    ends = {(event.stage, event.done) for event in chunks if event.done}
    assert isinstance(events[-1], Finished)
    assert events[-1].report.mode == "sparse"
    return counts["waits"], len(ends), str(events[-1].report.scoring)


def test_between_draft_and_target_the_host_waits_once() -> None:
    """For the importance. Each chunk of either is waited for, and the first token."""
    heads = DraftHeads((Head(1, 3, 0.5), Head(0, 0, 0.25)), 2, 3, {"copy": 1.0})
    waits, chunks, _ = sparse_run(with_heads(tiny_pair(), heads), prompt=random_prompt(640))
    assert waits == chunks + 1 + 1


def test_other_lines_that_may_ask_are_no_second_wait() -> None:
    waits, chunks, scoring = sparse_run(mapped_pair(), **conversation(4 * TEXT + ASKED + " Answer in one word."))
    assert "more lines that may ask" in scoring
    assert waits == chunks + 1 + 1


@pytest.mark.parametrize("rows", [1, 4])
def test_the_next_forward_is_queued_before_a_token_is_waited_for(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = tiny_model("llama"), list[str]()
    batch = DecodeBatch(model)
    for uid, row in enumerate(make_rows(VOCAB, rows)):
        batch.add(DecodeRow(uid, *prefilled(model, row), greedy))
    batch.step()
    for owner, name in ((mx, "async_eval"), (np, "array")):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, _call=call, _name=name: calls.append(_name) or _call(*args))
    batch.step()
    monkeypatch.undo()
    assert calls == ["async_eval", "array"]
