"""Recorded sessions: the right ones are taken, an action's names are found, intervals resample sessions."""

import json
from pathlib import Path

import numpy as np
import pytest

from mlx_specprefill import Engine, load_pair
from mlx_specprefill_evals import agents
from mlx_specprefill_evals.arms import arms
from mlx_specprefill_evals.command import Options, evaluate
from mlx_specprefill_evals.local import LocalModel, examination
from mlx_specprefill_evals.statistics import interval

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
ACTION = (
    'I will read src/engine/loop.py again.\n\n[Tool: shell({"cmd":"rg -n fetch_rows src/store.py","timeout_ms":9})]'
)


def case(session: str, tokens: int, text: str) -> dict[str, object]:
    said = [("user", "Find the bug."), ("assistant", '[Tool: shell({"cmd":"ls"})]'), ("user", text)]
    messages = [{"role": role, "content": content} for role, content in said]
    return {
        "source_session_id": session,
        "context_tokens_approx": tokens,
        "messages": messages,
        "reference_response": ACTION,
    }


@pytest.fixture(autouse=True)
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filler = " ".join(f"line {number} of the listing" for number in range(120))
    text = f"[tool result]\n{filler}\nsrc/store.py has fetch_rows\n{filler}\nsrc/engine/loop.py"
    developed, other = f"{agents.DEVELOPMENT[0]}-x", "0aaaaaaa-x"
    cases = [case(developed, 900, text), case(developed, 900, text), case(developed, 9000, text + " more")]
    file = tmp_path / "cases.json"
    file.write_text(json.dumps({"cases": [*cases, case(other, 100, "kept for acceptance")]}))
    monkeypatch.setattr(agents, "install", lambda wanted: None)
    monkeypatch.setattr(agents, "locate", lambda wanted: file)


def test_development_never_sees_the_sessions_for_acceptance() -> None:
    found = agents.items(131072)
    assert [item.group for item in found] == [f"{agents.DEVELOPMENT[0]}-x"] * 2  # one of three is there twice
    assert not any("acceptance" in turn.question for item in found for turn in item.turns)
    assert [item.group for item in agents.items(131072, acceptance=True)] == ["0aaaaaaa-x"]
    assert len(agents.items(1000)) == 1


def test_the_result_of_a_call_is_a_tool_message() -> None:
    assert [turn.role for turn in agents.items(1000)[0].turns] == ["user", "tool"]


def test_names_are_words_of_arguments_and_names_in_the_text() -> None:
    context = "src/engine/loop.py src/store.py fetch_rows timeout_ms again something"
    assert agents.identifiers(ACTION, context) == ("fetch_rows", "src/store.py", "src/engine/loop.py")
    assert agents.identifiers(ACTION, "fetch_rows") == ("fetch_rows",)


def test_an_action_is_judged_by_its_likelihood_and_the_names_that_were_kept(tmp_path: Path) -> None:
    chosen = arms(["sparse", "recency", "oracle"], ["0.2"])
    options = Options(("agents",), (1000,), chosen, 4, out=tmp_path / "run")
    with Engine(load_pair(str(DEMO / "target"), str(DEMO / "draft")), examination()) as engine:
        report = evaluate(options, LocalModel(engine), print)
    (cell,) = report["paired"]
    found = cell["arms"]
    assert (cell["task"], cell["n"]) == ("agents", 1)
    assert found["oracle@0.2"]["mentioned"]["mean"] == 1
    assert 0 < found["recency@0.2"]["mentioned"]["mean"] < 1
    assert found["full"]["nll"]["mean"] > 0
    assert {"difference"} < found["sparse@0.2"]["nll"].keys() | {"x"}
    assert report["run"]["sessions"] == "development"


def test_an_interval_resamples_groups() -> None:
    values, groups = [0.0] * 10 + [1.0] * 10, ["a"] * 10 + ["b"] * 10
    assert interval(values, groups) == (0.0, 1.0)  # two sessions say little, however many cut points they have
    low, high = interval(values)
    assert 0.25 < low < high < 0.75
    assert interval(np.array([1.0, 1.0])) == (1.0, 1.0)
