"""scripts/bench load: the plan of requests, the search for the highest rate, and what counts as late."""

from __future__ import annotations

import math
import statistics
import threading
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
from benchmarks.harness import BenchError
from benchmarks.harness.servers import Reply, Server
from benchmarks.harness.text import Text
from benchmarks.load import ANSWERS, Arm, Request, Trial, highest, planned

PLAN = planned(5.0, 400.0, (600, 4000), seed=1)


def test_the_plan_is_what_the_documentation_says() -> None:
    assert planned(5.0, 400.0, (600, 4000), seed=1) == PLAN != planned(5.0, 400.0, (600, 4000), seed=2)
    assert len(PLAN) == pytest.approx(2000, rel=0.1)
    assert all(600 <= one.tokens <= 4000 and ANSWERS[0] <= one.answer <= ANSWERS[1] for one in PLAN)
    assert statistics.mean(math.log(one.tokens) for one in PLAN) == pytest.approx(math.log(600 * 4000) / 2, rel=0.01)
    assert statistics.mean(one.prefix is not None for one in PLAN) == pytest.approx(0.3, abs=0.04)
    assert statistics.mean(one.follows is not None for one in PLAN) == pytest.approx(0.3, abs=0.04)
    gaps = [after.at - before.at for before, after in pairwise(PLAN)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1)  # as an exponential distribution has it


def test_a_conversation_goes_on_once_and_behind_what_it_follows() -> None:
    followed = [one.follows for one in PLAN if one.follows is not None]
    assert len(set(followed)) == len(followed)
    assert all(one.follows < number for number, one in enumerate(PLAN) if one.follows is not None)


@pytest.mark.parametrize("true", [0.07, 0.3, 0.5, 0.99, 3.7, 40.0])
def test_the_highest_rate_is_found_within_its_factor(true: float) -> None:
    found = highest(0.5, 3, lambda rate: rate <= true)
    assert found is not None
    assert found <= true < found * 2 ** (1 / 8) * 1.001


def test_a_server_that_keeps_up_with_nothing_has_none() -> None:
    tried: list[float] = []
    assert highest(0.5, 3, lambda rate: tried.append(rate) or False) is None
    assert tried == [0.5, 0.25, 0.125, 0.0625]


def test_prompts_of_every_arm_are_as_long_as_planned() -> None:
    class Counting:
        def ask(self, messages: list[dict[str, str]], tokens: int) -> Reply:
            return Reply(prompt_tokens=2 * len(messages[0]["content"].split()))

    text = Text(0)
    for _ in range(3):  # once for each arm's server
        text.calibrate(cast(Server, Counting()))
        assert len(text.of(1000).split()) == len(text.fresh("rate").of(1000).split()) == 500


class Quick:
    """Answers at once. Keeps what it was asked."""

    def __init__(self, fail: bool = False, first_s: float = 0.1) -> None:
        self.fail, self.first_s = fail, first_s
        self.asked: list[tuple[list[dict[str, str]], int]] = []
        self._lock = threading.Lock()

    def ask(self, messages: list[dict[str, str]], tokens: int, **_: Any) -> Reply:
        with self._lock:
            self.asked.append((messages, tokens))
        if self.fail:
            raise BenchError("refused")
        return Reply(text=f"Answer {len(messages)}", first_s=self.first_s)


def tried(server: Quick, plan: list[Request], limit_s: float = 1.0) -> Trial:
    trial = Trial(Arm("arm", cast(Server, server), {}), plan, Text(0), ["Shared text"] * 4, limit_s)
    trial.run()
    return trial


AT_ONCE = [replace(one, at=0.0) for one in PLAN[:60]]


def test_what_follows_holds_the_conversation_and_its_answer() -> None:
    server = Quick()
    row = tried(server, AT_ONCE).row(5.0)
    assert (row["requests"], row["unanswered"], row["p95_s"], row["sustained"]) == (60, 0, 0.1, True)
    assert len(server.asked) == 60
    longer = [messages for messages, _ in server.asked if len(messages) > 1]
    assert len(longer) == sum(one.follows is not None for one in AT_ONCE)
    for messages in longer:
        assert [message["role"] for message in messages[:3]] == ["user", "assistant", "user"]
        assert messages[1]["content"] == "Answer 1"
    shared = [messages for messages, _ in server.asked if messages[-1]["content"].startswith("Shared text ")]
    assert len(shared) == sum(one.prefix is not None for one in AT_ONCE)


def test_the_rest_is_not_sent_when_a_tenth_is_too_late() -> None:
    server = Quick(first_s=2.0)
    plan = [replace(one, at=0.02 * number, follows=None) for number, one in enumerate(AT_ONCE)]
    begun = time.monotonic()
    row = tried(server, plan).row(5.0)
    assert 6 < len(server.asked) < 60
    assert (row["unanswered"], row["sustained"], row["p95_s"]) == (60 - len(server.asked), False, None)
    assert time.monotonic() - begun < 60


def test_a_server_that_refuses_sustains_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    row = tried(Quick(fail=True), AT_ONCE).row(5.0)
    assert (row["unanswered"], row["p50_s"], row["sustained"]) == (60, None, False)
    assert "refused" in capsys.readouterr().err
