"""Shared code of all benchmarks: the command, models, servers, clients, text, clocks, statistics and tables."""


class BenchError(Exception):
    """Something outside the measurements went wrong; the message is for people."""
