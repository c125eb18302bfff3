"""What a request must be so that it can run at all. Pure."""

from __future__ import annotations

import numpy as np

from ..errors import ContextLengthError, InvalidRequestError
from ..loading import ModelPair
from ..request import GenerationRequest
from ..sampling import check_sampling

__all__ = ["check_request"]


def check_request(request: GenerationRequest, pair: ModelPair) -> None:
    """Refuse what can never run with this pair; grammars and memory are looked at elsewhere.

    Raises:
        InvalidRequestError: names the field; ContextLengthError when the prompt leaves no room.
    """
    M = len(request.prompt)
    if M == 0:
        raise InvalidRequestError("the prompt is empty", field="prompt")
    if request.max_tokens < 0 or (request.max_tokens == 0 and request.prompt_logprobs is None):
        raise InvalidRequestError("max_tokens must be at least 1", field="max_tokens")
    if M + request.max_tokens > pair.context_length:
        raise ContextLengthError(M, request.max_tokens, pair.context_length)
    if request.prompt.min() < 0 or request.prompt.max() >= pair.vocab_size:
        raise InvalidRequestError("the prompt has token ids outside the vocabulary", field="prompt")
    if not 0 <= request.min_tokens <= request.max_tokens:
        raise InvalidRequestError("min_tokens must be between 0 and max_tokens", field="min_tokens")
    _check_budget(request, pair)
    _check_importance(request)
    check_sampling(request.sampling, pair.vocab_size)


def _check_budget(request: GenerationRequest, pair: ModelPair) -> None:
    budget = request.reasoning
    if budget is None:
        return
    named = (*budget.start, *budget.end, *budget.closing)
    if budget.tokens < 0 or not (budget.start and budget.end and budget.closing[: len(budget.end)] == budget.end):
        message = "reasoning needs tokens >= 0, a start, and a closing that begins with its end"
        raise InvalidRequestError(message, field="reasoning")
    if not all(0 <= token < pair.vocab_size for token in named):
        raise InvalidRequestError("reasoning has token ids outside the vocabulary", field="reasoning")


def _check_importance(request: GenerationRequest) -> None:
    importance = request.specprefill.importance
    if importance is None:
        return
    if importance.shape != (len(request.prompt),) or not np.isfinite(importance).all():
        raise InvalidRequestError("importance must be one finite number per prompt token", field="importance")
