"""Every arm on the demo pair, through the engine's own path."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlx_specprefill import Engine, GenerationRequest, load_pair
from mlx_specprefill_evals.arms import ARM_KINDS, FULL, SERVED_KINDS, arms
from mlx_specprefill_evals.errors import NotMeasuredError
from mlx_specprefill_evals.facts import Turn
from mlx_specprefill_evals.local import LocalModel, examination
from mlx_specprefill_evals.tasks import TASKS, Item, Space, make_item
from mlx_specprefill_server.prompt.builder import PromptBuilder
from mlx_specprefill_server.prompt.conversation import conversation

LOCAL_KINDS = [kind for kind in ARM_KINDS if kind not in SERVED_KINDS]
DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


@pytest.fixture(scope="module")
def model():
    with Engine(load_pair(str(DEMO / "target"), str(DEMO / "draft")), examination()) as engine:
        yield LocalModel(engine)


@pytest.fixture(scope="module")
def replies(model):
    item = make_item(TASKS["needle"], "needle", 2, Space(768, model.count))
    asked = model.ask(item, arms(LOCAL_KINDS, ["0.2"]), 40, 0)
    return item, {arm.name: reply for arm, reply in asked.items()}


def test_every_arm_answers(replies):
    item, found = replies
    assert set(found) == {"full"} | {f"{kind}@0.2" for kind in LOCAL_KINDS if kind != "full"}
    for name in ("full", "sparse@0.2", "oracle@0.2"):
        assert item.values[0] in found[name].text


def test_all_arms_see_as_many_tokens(replies):
    _, found = replies
    kept = [reply.kept for name, reply in found.items() if name != "full"]
    assert found["full"].kept == 1
    assert max(kept) - min(kept) < 0.05
    assert min(kept) > 0.15


def test_gold_recall_is_one_for_the_oracle_and_none_for_the_end_of_the_prompt(replies):
    _, found = replies
    assert found["oracle@0.2"].measures["recall"] == 1
    assert found["recency@0.2"].measures["recall"] == 0


def test_a_system_message_is_part_of_the_prompt(model):
    made = make_item(TASKS["place_system"], "place_system", 3, Space(700, model.count))
    prompt, gold, _ = model._rendered(made)
    assert [span.kind for span in prompt.spans] == ["system", "user"]
    assert made.gold[0] in model._decode(prompt.tokens[slice(*gold[0])].tolist())


def test_the_oracle_does_not_apply_where_everything_counts(model):
    item = replace(make_item(TASKS["needle"], "needle", 0, Space(600, model.count)), gold=())
    asked = model.ask(item, arms(["oracle", "random"], ["0.2"]), 4, 0)
    assert {arm.name for arm in asked} == {"full", "random@0.2"}


def test_a_prompt_that_can_not_be_prefilled_sparsely_is_not_measured(model):
    short = Item((Turn("Who?", "None."),), ("1",))
    with pytest.raises(NotMeasuredError, match="ran in full mode"):
        model.ask(short, arms(["sparse"], ["0.2"]), 4, 0)


def test_too_long_a_prompt_is_not_measured(model):
    with pytest.raises(NotMeasuredError, match="context"):
        model.ask(Item((Turn("word " * 40_000, ""),), ("1",)), arms([], []), 4, 0)


@pytest.fixture(scope="module")
def forced(model):
    item = make_item(TASKS["copy"], "copy", 0, Space(700, model.count))
    return item, model.ask(item, arms(LOCAL_KINDS, ["0.2"]), 16, 0)


def test_a_known_answer_is_judged_without_generating_it(forced):
    _, found = forced
    assert {arm.kind for arm in found} == set(LOCAL_KINDS)
    for arm, reply in found.items():
        assert reply.score == float(reply.measures["right"] == 1)
        assert reply.measures["nll"] > 0
        assert ("kl" in reply.measures) == (arm.kind != "full")
        assert reply.kept == 1 if arm.kind == "full" else 0.15 < reply.kept < 0.3
    recall = {arm.kind: reply.measures.get("recall") for arm, reply in found.items()}
    assert recall["oracle"] == 1
    assert recall["recency"] == 0
    assert recall["full"] is None


@pytest.mark.parametrize(("name", "raw"), [("copy", True), ("quote", False)])
def test_the_likeliest_tokens_are_what_greedy_decoding_gives(model, name, raw):
    """Tokens are compared up to the first that is not the answer's. The opening is given, and the border may lie in a
    token.
    """
    item = make_item(TASKS[name], name, 1, Space(600, model.count))
    assert item.known.raw == raw
    reply = model.ask(item, arms([], []), 16, 0)[FULL]
    engine, encode = model._engine, model._encode
    builder = PromptBuilder(engine.pair.tokenizer)
    text = item.turns[0].question
    if raw:
        prompt = asyncio.run(builder.raw(text)).tokens
    else:
        said = conversation([{"role": "user", "content": text}])
        prompt = (*asyncio.run(builder.chat(said)).tokens, *encode(item.known.opening))
    answer = encode(item.known.answer)
    law = engine.replay(GenerationRequest(prompt, 1), answer).logprobs
    assert engine.pair.tokenizer.decode(law.argmax(axis=1).tolist()) == reply.text
    assert reply.measures["nll"] == pytest.approx(-law[np.arange(len(answer)), list(answer)].mean(), abs=1e-3)


@pytest.mark.parametrize("kind", SERVED_KINDS)
def test_arms_of_a_server_are_refused(model, replies, kind):
    with pytest.raises(NotMeasuredError, match=f"arm {kind} needs a server"):
        model.ask(replies[0], arms([kind], []), 8, 0)
