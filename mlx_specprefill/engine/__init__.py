"""Requests in, events out, on one MLX thread."""
