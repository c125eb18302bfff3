"""The HTTP server and the command line over `mlx_specprefill`."""

__version__ = "0.1.0"
