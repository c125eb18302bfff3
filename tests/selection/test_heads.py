"""Heads found by calibration, written and read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_specprefill import LoadError
from mlx_specprefill.selection.heads import DraftHeads, Head, read_heads

HEADS = DraftHeads((Head(14, 8, 0.5), Head(3, 0, 0.25)), 15, 30, {"copy": 0.875, "needle": 0.5})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "heads.json").write_text(json.dumps(HEADS.to_dict()))
    assert read_heads(tmp_path / "heads.json") == HEADS
    assert DraftHeads.from_dict(HEADS.to_dict() | {"shares": {}}) == HEADS  # of an earlier version
    assert HEADS.by_call == {14: [8], 3: [0]}
    assert DraftHeads((Head(1, 2, 1.0), Head(1, 0, 1.0)), 2, 2, {}).by_call == {1: [2, 0]}


@pytest.mark.parametrize(
    "changed",
    [
        {"heads": []},
        {"heads": [[1, 2]]},
        {"heads": [[1, 2, 0.0]]},
        {"heads": [[1, 2, -1.0]]},
        {"heads": [[1, "x", 1.0]]},
        {"heads": None},
        {"heads": [[-1, 0, 1.0]]},
        {"heads": [[0, -1, 1.0]]},
        {"heads": [[0, 0, float("nan")]]},
        {"heads": [[0, 0, float("inf")]]},
        {"depth": 0},
        {"depth": 31},
        {"depth": "x"},
        {"layers": None},
        {"recall": []},
        {"recall": {"copy": "x"}},
    ],
)
def test_malformed_heads_are_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    values = HEADS.to_dict() | changed
    with pytest.raises(ValueError, match="no calibrated heads"):
        DraftHeads.from_dict(values)
    (tmp_path / "heads.json").write_text(json.dumps(values))
    with pytest.raises(LoadError, match=r"heads\.json: no calibrated heads"):
        read_heads(tmp_path / "heads.json")


@pytest.mark.parametrize("missing", ["heads", "depth", "layers", "recall"])
def test_every_part_is_needed(missing: str) -> None:
    values = HEADS.to_dict()
    del values[missing]
    with pytest.raises(ValueError, match="no calibrated heads"):
        DraftHeads.from_dict(values)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"heads"', "[[1, 2, 3.0]]"])
def test_files_of_something_else_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "heads.json").write_text(text)
    with pytest.raises(LoadError, match=r"heads\.json"):
        read_heads(tmp_path / "heads.json")


def test_files_that_can_not_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "heads.json").write_bytes(b"\xff\xfe{")
    for name in ("heads.json", "missing.json", "."):
        with pytest.raises(LoadError):
            read_heads(tmp_path / name)


@pytest.mark.parametrize(
    ("recall", "refused"),
    [({}, False), ({"copy": 0.5, "needle": 0.1}, False), ({"copy": 0.49, "needle": 0.1}, True), ({"copy": 1.0}, False)],
)
def test_a_draft_that_finds_no_kind_of_item_is_refused(recall: dict[str, float], refused: bool) -> None:
    found = DraftHeads(HEADS.heads, 1, 1, recall).refusal
    assert (found is not None) == refused
    assert found is None or "copy 0.49, needle 0.10" in found
