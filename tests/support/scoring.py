"""A scorer's input for a prompt without messages, from its first token on."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill import ScoringConfig
from mlx_specprefill.selection.question_lines import question_span
from mlx_specprefill.selection.scorer import ScoringInput


def scoring_input(draft: nn.Module, prompt: Any, config: ScoringConfig, **given: Any) -> ScoringInput:
    ids = np.asarray(prompt, dtype=np.int32)
    defaults = {
        "question": question_span(ids.size, config),
        "template": np.zeros(ids.size, dtype=np.bool_),
        "stop_ids": frozenset(),
        "cache": list(make_prompt_cache(draft)),
        "step": lambda: config.prefill_step,
    }
    return ScoringInput(ids, **(defaults | given))
