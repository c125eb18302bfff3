"""The HTTP status and the error object of every failure: one mapping, two rings (known errors, and the rest).

The object has OpenAI's shape, or Anthropic's on the paths of that dialect.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlx_specprefill import (
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    RequestCancelled,
    SpecPrefillError,
)

from ..big_json import dumps

logger = logging.getLogger(__name__)

RETRY_AFTER_S = "2"
CLIENT_CLOSED_REQUEST = 499  # for the access log; the client is gone
ANTHROPIC_PATH = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
ANTHROPIC_OVERLOADED = 529
# Paths of other kinds of server. The message tells their clients that the mistake is not theirs.
NOT_DONE_HERE = {
    "/v1/embeddings": "This server generates text and makes no embeddings.",
    "/v1/rerank": "This server generates text and ranks no documents.",
}


class JsonResponse(Response):
    """A response in JSON, without NaN or half a surrogate pair."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


class ApiError(Exception):
    """A refusal in the form that clients get. `extra` joins the error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})

    def body(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error | self.extra}


class DeadlineError(ApiError):
    """The request has used up its time."""

    def __init__(self, seconds: float) -> None:
        message = (
            f"The request was not finished within the {seconds:g} s of its header x-request-timeout. Allow more time, "
            "or lower max_tokens."
        )
        super().__init__(504, message, code="request_timeout")


def refusal(field: str, why: str) -> InvalidRequestError:
    """Return the refusal of a body's field; `field` is its path, like `messages[0].content[1].type`."""
    return InvalidRequestError(f"{field}: {why}", field=field)


def require(condition: bool, field: str, rule: str) -> None:
    """Refuse the field unless the condition holds, by an InvalidRequestError."""
    if not condition:
        raise refusal(field, rule)


def api_error(exc: Exception) -> ApiError:
    """Return an exception's refusal. This is the only mapping to statuses; errors that a retry can't mend are never a
    503.
    """
    match exc:
        case ApiError():
            return exc
        case ContextLengthError():
            counts = {"n_prompt_tokens": exc.prompt_tokens, "n_ctx": exc.context_length}
            return ApiError(400, str(exc), param=exc.field, code="context_length_exceeded", extra=counts)
        case InvalidRequestError():
            return ApiError(400, str(exc), param=exc.field, code="invalid_value")
        case EngineClosedError() | RequestCancelled():
            return ApiError(503, str(exc), code="engine_unavailable", headers={"Retry-After": RETRY_AFTER_S})
        case SpecPrefillError():
            return ApiError(500, str(exc), code="engine_error")
        case ClientDisconnect():
            return ApiError(CLIENT_CLOSED_REQUEST, "the client closed the request")
        case RequestValidationError():
            return ApiError(400, "The request is not valid.", code="invalid_value")
        case HTTPException():
            message = exc.detail or HTTPStatus(exc.status_code).phrase
            code = {404: "unknown_url", 405: "method_not_allowed"}.get(exc.status_code)
            return ApiError(exc.status_code, message, code=code, headers=exc.headers)
        case _:
            return ApiError(
                500,
                "The server failed on this request; its log has the traceback.",
                code="internal_error",
            )


def anthropic_body(exc: Exception) -> dict[str, Any]:
    """Return Anthropic's error object. Its clients read both numbers of an overflow from the message."""
    error = api_error(exc)
    message = str(error)
    if isinstance(exc, ContextLengthError):
        message = f"prompt is too long: {exc.total_tokens} tokens > {exc.context_length} maximum"
    kind = ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_response(exc: Exception, path: str) -> Response:
    """Return any exception as a response to a request of `path`. Only 429 and 503 invite the client to retry."""
    error = api_error(exc)
    headers = error.headers if error.status in (429, 503) else error.headers | {"x-should-retry": "false"}
    if path != ANTHROPIC_PATH and not path.startswith(f"{ANTHROPIC_PATH}/"):
        return JsonResponse(error.body(), error.status, headers)
    status = ANTHROPIC_OVERLOADED if error.status == 503 else error.status
    return JsonResponse(anthropic_body(exc), status, headers)


async def _known(request: Request, exc: Exception) -> Response:
    if isinstance(exc, HTTPException) and exc.status_code == 404:
        path = request.url.path
        nothing = f"There is nothing at {path[:200]}; most paths of this API begin with /v1/."
        exc = ApiError(404, NOT_DONE_HERE.get(path, nothing), code="unknown_url")
    if api_error(exc).status == 500:
        logger.error("%s %s: %s", request.method, request.url.path, exc, exc_info=exc)
    return error_response(exc, request.url.path)


async def _unexpected(request: Request, exc: Exception) -> Response:
    # the outer ring raises it again after answering, so the log has the traceback
    response = error_response(exc, request.url.path)
    response.headers["x-request-id"] = request.scope["request_trace"].id  # its middleware has already returned
    return response


def install(app: FastAPI) -> None:
    """Register both rings."""
    for kind in (ApiError, SpecPrefillError, ClientDisconnect, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _known)
    app.add_exception_handler(Exception, _unexpected)
