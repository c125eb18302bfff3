"""Failures on their way out: logged with or without a traceback, and rid of the arrays that tracebacks hold."""

from __future__ import annotations

import logging

from ...errors import InvalidRequestError

log = logging.getLogger(__name__)


def log_failure(log: logging.Logger, what: str, error: BaseException | None) -> None:
    """Log a failure with its traceback, or without it if the request was invalid: the client gets the reason."""
    if isinstance(error, InvalidRequestError):
        log.info("%s: %s", what, error)
    else:
        log.error(what, exc_info=error)


def strip_traceback(error: Exception) -> Exception:
    """Return the error without tracebacks, also in its causes: their arrays would live as long as the event does."""
    links: list[BaseException | None] = [error]
    for link in links:
        if link is not None and link.__traceback__ is not None:
            link.__traceback__ = None
            links += [link.__cause__, link.__context__]
    return error
