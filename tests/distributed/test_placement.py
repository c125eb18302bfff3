"""Which of several ranks read prompts with the draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_specprefill import LoadError, Ranks
from mlx_specprefill.adapters import placement
from mlx_specprefill.adapters.placement import fits_beside, place_draft, predicted_s
from mlx_specprefill.distributed.ranks import Group
from mlx_specprefill.reading import choose_placement
from tests.oracle import build, tiny_models

LLAMA = tiny_models()["llama"].config


class OneOfTwo(Ranks):
    """Rank 0, where the other one always agrees."""

    size = 2


class Unlike(Ranks):
    """The other rank has no files."""

    size = 2

    def every(self, fact: bool) -> bool:
        return False


def group(made: Callable[[], Ranks] = OneOfTwo) -> Group:
    return cast(Group, made())


def test_a_sharded_draft_is_predicted_by_its_part_and_by_two_sums_per_layer() -> None:
    assert predicted_s(8.0, 0.25, 4, 2) == 4.0 + 8 * 0.25


@pytest.mark.parametrize(("collective_s", "expected"), [(1e-3, "sharded"), (0.5, "first")])
def test_the_faster_placement_is_taken(monkeypatch: pytest.MonkeyPatch, collective_s: float, expected: str) -> None:
    monkeypatch.setattr(placement, "_forward_s", lambda draft: 1.0)
    monkeypatch.setattr(placement, "_collective_s", lambda *_: collective_s)
    assert place_draft(build("llama"), LLAMA, group()) == expected


@pytest.mark.parametrize(
    ("name", "change"),
    [("llama", {"num_key_value_heads": 3}), ("nemotron_h", {}), ("qwen3_next", {})],
)
def test_what_can_not_be_sharded_is_on_rank_0(name: str, change: dict[str, Any]) -> None:
    config = tiny_models()[name].config | change
    assert place_draft(build(name), config, group()) == "first"
    assert place_draft(None, None, group()) == "first"


def size_of(model: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def test_a_draft_without_room_on_rank_0_is_sharded(tmp_path: Path) -> None:
    target = build("llama")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    room = size_of(target) + 1000
    assert fits_beside(target, tmp_path, room)
    assert not fits_beside(target, tmp_path, room - 1)
    assert fits_beside(target, tmp_path, None)
    assert choose_placement(tmp_path, None, "auto", group(), target, room) == "auto"
    assert choose_placement(tmp_path, None, "auto", group(), target, room - 1) == "sharded"
    assert choose_placement(tmp_path, None, "all", group(), target, room - 1) == "all"


def test_a_draft_that_another_rank_has_not_stored_is_on_rank_0(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert choose_placement(tmp_path, None, "auto", group(Unlike), build("llama"), 1) == "first"


def test_trained_heads_are_not_split(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="--draft-placement is sharded"):
        choose_placement(tmp_path, "heads.safetensors", "sharded", group(), build("llama"), None)
    (tmp_path / "config.json").write_text("{}")
    assert choose_placement(tmp_path, "heads.safetensors", "auto", group(), build("llama"), 1) == "first"
