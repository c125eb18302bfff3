"""The HTTP server and the command line over `mlx_specprefill`."""
