"""The HTTP server and the command line over `mlx_specprefill`, and pairs by name for Python programs."""

from mlx_specprefill import __version__

from .local import Answer, LocalPair, open_pair

__all__ = ["Answer", "LocalPair", "__version__", "open_pair"]
