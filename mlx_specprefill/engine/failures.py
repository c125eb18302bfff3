"""Logs failed requests."""

from __future__ import annotations

import logging

from ..errors import InvalidRequestError

__all__ = ["log_failure"]


def log_failure(log: logging.Logger, what: str, error: BaseException | None) -> None:
    """Log a failure with its traceback, or without it if the request was invalid: the client gets the reason."""
    if isinstance(error, InvalidRequestError):
        log.info("%s: %s", what, error)
    else:
        log.error(what, exc_info=error)
