"""What the log says of a request that failed."""

from __future__ import annotations

import logging

from ..errors import InvalidRequestError

__all__ = ["log_failure"]


def log_failure(log: logging.Logger, what: str, error: BaseException | None) -> None:
    """With its traceback, unless the request itself was at fault: its client gets the reason."""
    if isinstance(error, InvalidRequestError):
        log.info("%s: %s", what, error)
    else:
        log.error(what, exc_info=error)
