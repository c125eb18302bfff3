"""Models over two processes, which wait for each other in every check at the start, and in every answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .ranks import found_in
from .worker import LOADED_NAMES, PROMPT

LIMIT_S = 60


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_in("loaded", tmp_path_factory.mktemp("ranks"), LIMIT_S)


@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("name", LOADED_NAMES)
def test_answers_are_those_of_one_process(found: dict[str, Any], name: str) -> None:
    one, several = found[name]["one"], found[name]["several"]
    np.testing.assert_allclose(several.pop("logprobs"), one.pop("logprobs"), atol=2e-5)
    assert several == one
    assert one["kept"] < PROMPT


@pytest.mark.timeout(3 * LIMIT_S)
def test_no_rank_waits_for_one_that_refuses(found: dict[str, Any]) -> None:
    assert found["refusal"] == "another machine refuses it; its log says why"
