"""Shared code of all benchmarks: the command, models, servers, clients, text, clocks, statistics and tables."""

from collections.abc import Mapping


class BenchError(Exception):
    """A failure outside the measurements. The message is meant for the user."""


class UnequalWorkError(BenchError):
    """Arms that are compared did not do the same work."""


def check_alike(what: str, counts: Mapping[str, int], share: float = 0.0) -> None:
    """Check that all arms have counted the same, but for a share of the largest count.

    Raises:
        UnequalWorkError: they have not.
    """
    if counts and max(counts.values()) - min(counts.values()) > share * max(counts.values()):
        raise UnequalWorkError(f"{what} differ between the arms, so their times can't be compared: {dict(counts)}")
