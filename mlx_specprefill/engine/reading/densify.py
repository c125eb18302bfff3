"""Reads the prompt of a sparse turn in full, into the exact cache, behind what is dense already."""

from __future__ import annotations

from collections.abc import Generator
from fractions import Fraction

import mlx.core as mx
import numpy as np

from ...cache.held import HeldTokens
from ...events import Progress, PromptLogprobs
from ...prefill_report import Reason
from ...request import GenerationRequest
from ...selection.plan import PrefillPlan
from ..prefixes.lookup import Prefix
from ..requests.active_request import ActiveRequest
from .prefill import Prefiller

READ_ALL = PrefillPlan("full", Reason("other", "read in idle time"), Fraction(1), np.zeros(0, dtype=np.bool_))


def densify(
    prefiller: Prefiller, request: GenerationRequest
) -> Generator[Progress | PromptLogprobs, None, tuple[ActiveRequest, mx.array]]:
    """Prefill the prompt into the exact cache. May be interrupted at every chunk; cancelled, it keeps them.

    Returns:
        The request with its cache, and the logits of the last token, (1, V).
    """
    active, last = ActiveRequest(-1, request, READ_ALL), len(request.prompt) - 1
    active.prefix = Prefix(last, HeldTokens.all(last))  # at most
    logits = yield from prefiller.read(active, np.array([last], dtype=np.int32), again=True)
    active.store()
    if prefiller.is_stateful:  # the next turn begins with all of it: the sparse turn has a state at its end
        active.keep_prompt(prefiller.caches, len(request.prompt))
    return active, logits
