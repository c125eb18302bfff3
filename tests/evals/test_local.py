"""Every arm on the demo pair, through the engine's own path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlx_specprefill import Engine, Replay, load_pair
from mlx_specprefill.request import Account
from mlx_specprefill_server.evals.arms import ARM_KINDS, arms
from mlx_specprefill_server.evals.errors import NotMeasuredError
from mlx_specprefill_server.evals.facts import Turn
from mlx_specprefill_server.evals.local import LocalExaminee, divergence, examination
from mlx_specprefill_server.evals.tasks import TASKS, Item, Space, make_item

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


@pytest.fixture(scope="module")
def examinee():
    with Engine(load_pair(str(DEMO / "target"), str(DEMO / "draft")), examination()) as engine:
        yield LocalExaminee(engine)


@pytest.fixture(scope="module")
def replies(examinee):
    item = make_item(TASKS["needle"], "needle", 2, Space(768, examinee.count, 0.4))
    asked = examinee.ask(item, arms(list(ARM_KINDS), ["0.2"]), 40, 0, True)
    return item, {arm.name: reply for arm, reply in asked.items()}


def test_every_arm_answers(replies):
    item, found = replies
    assert set(found) == {"full"} | {f"{kind}@0.2" for kind in ARM_KINDS if kind != "full"}
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
    assert found["renumbered@0.2"].measures["recall"] == found["sparse@0.2"].measures["recall"]


def test_measures_are_in_their_ranges(replies):
    _, found = replies
    for name, reply in found.items():
        if name != "full":
            assert 0 <= reply.measures["mass"] <= 1
            assert 0 <= reply.measures["top1"] <= 1
            assert reply.measures["kl"] >= -1e-6
    assert found["sparse@0.2"].measures["mass"] > found["random@0.2"].measures["mass"]
    assert found["sparse@0.2"].measures["kl"] < 0.1 < found["random@0.2"].measures["kl"]  # nobody knows the code


def test_the_oracle_does_not_apply_where_everything_counts(examinee):
    item = make_item(TASKS["cwe"], "cwe", 0, Space(600, examinee.count))
    asked = examinee.ask(item, arms(["oracle", "random"], ["0.2"]), 4, 0, False)
    assert {arm.name for arm in asked} == {"full", "random@0.2"}


def test_a_prompt_that_can_not_be_prefilled_sparsely_is_not_measured(examinee):
    short = Item((Turn("Who?", "None."),), ("1",))
    with pytest.raises(NotMeasuredError, match="ran in full mode"):
        examinee.ask(short, arms(["sparse"], ["0.2"]), 4, 0, False)


def test_too_long_a_prompt_is_not_measured(examinee):
    with pytest.raises(NotMeasuredError, match="context"):
        examinee.ask(Item((Turn("word " * 40_000, ""),), ("1",)), arms([], []), 4, 0, False)


def test_divergence_by_hand():
    account = Account("full", "", 1, 1)
    p, q = np.log([[0.5, 0.5], [0.9, 0.1]]), np.log([[0.25, 0.75], [0.9, 0.1]])
    measured = divergence(Replay(p, account, None), Replay(q, account, None))
    assert measured["kl"] == pytest.approx((0.5 * np.log(2) + 0.5 * np.log(2 / 3)) / 2)
    assert measured["top1"] == 0.5  # 0.5 against 0.75 prefers the other token, the second row the same one
