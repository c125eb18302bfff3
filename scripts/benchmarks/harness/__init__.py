"""What all benchmarks share: the command, models, servers and their clients, text, clocks, statistics and tables."""


class BenchError(Exception):
    """Something outside the measurements went wrong; the message is for people."""
