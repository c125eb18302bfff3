"""On which of several ranks the draft is."""

from __future__ import annotations

from typing import Literal

__all__ = ["DraftPlacement", "PlacementChoice", "place_draft"]

DraftPlacement = Literal["all", "first"]
"""On every rank, or on rank 0 alone, which sends the others the importance."""
PlacementChoice = Literal["auto", "all", "first"]


def place_draft(choice: PlacementChoice) -> DraftPlacement:
    """The faster way; of two that take as long, the one that needs less memory.

    On rank 0 alone a draft takes as long as on all ranks, where the slowest of them is waited for; rank 0's importance
    is sent to the others either way.
    """
    return "first" if choice == "auto" else choice
