"""The HTTP server and the command line over `mlx_specprefill`."""

from mlx_specprefill import __version__

__all__ = ["__version__"]
