"""Sizes in words."""

from __future__ import annotations

__all__ = ["size"]


def size(count: int) -> str:
    """Return bytes in words."""
    return f"{count / 2**30:.1f} GB" if count >= 1 << 30 else f"{count / 2**20:.1f} MB"
