"""A target over two processes on MLX's ring answers as it does in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_specprefill.loading.one_model import sharding_of
from tests.support.oracle import build

from .ranks import found_in, logs, started
from .worker import MORE_NAMES, NAMES, SPLIT_KINDS, SPLIT_NAMES

LIMIT_S = 800.0  # on two cores: the two processes of a case compute some 200 s
pytestmark = pytest.mark.timeout(LIMIT_S + 60)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything in one pair of processes: to start them takes as long as many requests."""
    return found_in("equal", tmp_path_factory.mktemp("ranks"), LIMIT_S)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of the second half, which takes as long as the first."""
    return found_in("more", tmp_path_factory.mktemp("ranks"), LIMIT_S)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.nightly
def test_logits_and_answers_are_those_of_one_process(found: dict[str, Any], name: str) -> None:
    same_logits(**found[name])
    same_answers(**found[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", MORE_NAMES)
def test_logits_and_answers_of_further_models(more: dict[str, Any], name: str) -> None:
    same_logits(**more[name])
    same_answers(**more[name])


def same_logits(one: dict[str, Any], several: dict[str, Any]) -> None:
    for keep in ("None", "1/5", "1"):
        np.testing.assert_allclose(several[f"logprobs {keep}"], one[f"logprobs {keep}"], atol=2e-5)
        assert several[f"kept {keep}"] == one[f"kept {keep}"]
    assert one["kept 1/5"] < one["kept None"] == one["kept 1"]


def same_answers(one: dict[str, Any], several: dict[str, Any]) -> None:
    """Greedy, dense and sparse; drawn with a seed; behind a cached prefix, which is found on both ranks."""
    answers = [key for key in one if key.startswith("tokens")]
    assert {key: several[key] for key in answers} == {key: one[key] for key in answers}
    assert several["cached"] == one["cached"] > 0
    assert several["inspected"] == one["inspected"]


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_in("split", tmp_path_factory.mktemp("ranks"), LIMIT_S)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", SPLIT_KINDS)
@pytest.mark.parametrize("name", SPLIT_NAMES)
def test_split_heads_score_as_those_of_one_process(split: dict[str, Any], name: str, kind: str) -> None:
    """The target's own first layers, in stages, by heads of both ranks or of one."""
    one, several = split[f"{name}, {kind}"]["one"], split[f"{name}, {kind}"]["several"]
    np.testing.assert_allclose(several.pop("importance"), one.pop("importance"), atol=1e-5)
    assert several == one
    assert one["kept"] < 200


@pytest.mark.parametrize("name", ["llama, 8 rows", "turns", "broken"])
@pytest.mark.nightly
def test_rows_and_conversations(found: dict[str, Any], name: str) -> None:
    """Eight mixed rows; a sparse conversation that is extended and then made dense; a draft that fails."""
    assert found[name]["several"] == found[name]["one"]


@pytest.mark.nightly
def test_quantised_caches(more: dict[str, Any]) -> None:
    one, several = more["quantised cache"]["one"], more["quantised cache"]["several"]
    assert several["tokens"] == one["tokens"]
    assert several["kept"] == one["kept"]


@pytest.mark.nightly
def test_each_rank_keeps_its_part_of_a_prefix_on_disk(more: dict[str, Any]) -> None:
    assert more["first"]["several"]["cached"] == 0
    assert more["stored"]["several"] == more["stored"]["one"]
    assert more["stored"]["several"]["cached"] > 0


@pytest.mark.nightly
def test_what_one_rank_has_forgotten_is_read_again(more: dict[str, Any]) -> None:
    one, several = more["forgetful"]["one"], more["forgetful"]["several"]
    assert several["tokens"] == one["tokens"]
    assert several["cached"] < one["cached"]


@pytest.mark.nightly
def test_the_rank_with_the_least_memory_decides_what_fits(more: dict[str, Any]) -> None:
    one, several = more["limited"]["one"], more["limited"]["several"]
    assert several["tokens"] == one["tokens"]
    assert several["window"] < one["window"] == 4096
    assert f"maximum context length is {several['window']} tokens" in several["refused"]
    assert one["refused"] is None
    assert several["mode"] == one["mode"] == "sparse"


@pytest.mark.nightly
def test_a_crowd_does_not_get_the_ranks_out_of_step(tmp_path: Path) -> None:
    """Whatever clocks, clients and chance do: a rank that did something else would end all of them."""
    out = tmp_path / "out.json"
    with started(tmp_path, "-m", "tests.distributed.worker", "busy", str(out)) as processes:
        assert [process.wait(LIMIT_S) for process in processes] == [0, 0], logs(tmp_path)
    assert json.loads(out.read_text()) == {"failed": [], "answers": True}


def test_an_architecture_that_can_not_be_spread() -> None:
    assert sharding_of(build("nemotron_h")) is None
    assert sharding_of(build("qwen3_next")) == "pipeline"
    assert sharding_of(build("qwen3_5")) == "tensor"
