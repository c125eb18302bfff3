"""Shared code of all benchmarks: the command, models, servers, clients, text, clocks, statistics and tables."""


class BenchError(Exception):
    """A failure outside the measurements. The message is meant for the user."""
