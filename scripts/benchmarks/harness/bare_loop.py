"""The same models without a server: mlx-lm's own generate loop, and the prefills that bound a sparse one."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load

from .figures import Clock
from .stages import plain_prefill_ms
from .text import user

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

    def cpu_ms_per_token(self, text: str, count: int) -> float:
        """Processor time per token of the same, a short prompt included."""
        clock = Clock()
        self.generate(text, count)
        return clock.read()["cpu_ms"] / count

    def limit_ms(self, text: str, kept: int) -> float:
        """What a sparse prefill can't avoid: the draft over everything, the target over `kept` tokens.

        Both with the step sizes that were measured to suit this machine.
        """
        (measured,) = json.loads(self.costs.read_text()).values()
        prompt = self.tokens(text)
        draft = plain_prefill_ms(self.draft, prompt, measured["draft_step"])
        return draft + plain_prefill_ms(self.target, prompt[-kept:], measured["target_step"])
