"""The same models without a server: mlx-lm's own generate loop, and the prefills that bound a sparse one."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servers import user

import mlx.core as mx  # isort: skip  (after the library, which loads a BLAS first)
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load

from mlx_specprefill.specprefill.sparse_prefill import prefill

__all__ = ["BareLoop"]


@dataclass
class BareLoop:
    """Target and draft in this process. Nothing of the library touches them before their prefill."""

    target: Any
    draft: Any
    tokenizer: Any
    costs: Path

    @classmethod
    def of(cls, target: Path, draft: Path, costs: Path) -> BareLoop:
        """`costs` is where the server keeps what it has measured at its start."""
        model, tokenizer = load(str(target))[:2]
        return cls(model, load(str(draft))[0], tokenizer, costs)

    def tokens(self, text: str) -> list[int]:
        """The prompt as a server renders it."""
        return list(self.tokenizer.apply_chat_template(user(text), add_generation_prompt=True))

    def generate(self, text: str, count: int) -> tuple[float, float]:
        """Seconds to the first token, and per token after it, of `mlx_lm.generate.generate_step`."""
        prompt, begun = mx.array(self.tokens(text)), time.perf_counter()
        steps = generate_step(prompt, self.target, max_tokens=count)
        next(steps)
        first = time.perf_counter()
        rest = sum(1 for _ in steps)
        return first - begun, (time.perf_counter() - first) / max(rest, 1)

    def cpu_per_token(self, text: str, count: int) -> float:
        """Processor seconds per token of the same, a short prompt included."""
        begun = time.process_time()
        self.generate(text, count)
        return (time.process_time() - begun) / count

    def limit(self, text: str, kept: int) -> float:
        """Seconds of what a sparse prefill can't avoid: the draft over everything, the target over `kept` tokens.

        Both with the step sizes that were measured to suit this machine.
        """
        (measured,) = json.loads(self.costs.read_text()).values()
        prompt = self.tokens(text)
        draft = read(self.draft, prompt, measured["draft_step"])
        return draft + read(self.target, prompt[-kept:], measured["target_step"])


def read(model: Any, tokens: list[int], step: int) -> float:
    """Seconds of a plain prefill."""
    begun = time.perf_counter()
    for _ in prefill(model, list(make_prompt_cache(model)), tokens, None, step):
        pass
    return time.perf_counter() - begun
