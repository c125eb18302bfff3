"""The default rule: a few heads that calibration found to look from a question at its answer.

Most heads of a model look elsewhere, at the beginning, at neighbours, at punctuation; a few copy or retrieve (retrieval
heads, arXiv 2404.15574; QRHead, arXiv 2506.09944). Importance is the weighted mean of those few, each normalised to
the attention that it has for what is open to choice, read from the rows of the question. No token is generated, and
the draft needs to run no further than the last of these heads.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from ..adapters.capture import HeadCapture, pool
from ..adapters.heads import DraftHeads, Head
from ..config import ScoringConfig
from ..distributed.ranks import Ranks
from ..errors import SparseUnsupportedError
from ..request import Progress
from .scorer import Scores, ToScore, Undo, checked, read_prompt

__all__ = ["HeadScorer", "importance_of"]

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class HeadScorer:
    """Args:
    config: `pool_width` counts.
    ranks: over which the draft's heads are split.
    """

    heads: DraftHeads
    config: ScoringConfig
    ranks: Ranks | None = None

    def score(self, draft: nn.Module, task: ToScore) -> Generator[Progress, None, Scores]:
        """See `Scorer`."""
        M = task.prompt.size
        capture = HeadCapture(M + task.again.size, self.heads.by_call, 0 if self.ranks is None else self.ranks.rank)
        if task.again.size:
            yield from read_prompt(draft, task, M)
            _ask_again(draft, task, capture)
        else:
            yield from read_prompt(draft, task, M, task.question, capture.of_passage)
        importance = checked(self._importance({key: np.array(row)[:M] for key, row in capture.found.items()}, task))
        asked = task.again.size or task.question[1] - task.question[0]
        words = f"{len(self.heads.heads)} calibrated heads, {self.heads.depth} of {self.heads.layers} layers"
        return Scores(importance, "draft", words, (), asked, task.cache)

    def _importance(self, rows: Mapping[tuple[int, int], Floats], task: ToScore) -> Floats:
        """The sum of what each rank's heads say, in one reduction, which counts the heads too."""
        here = [head for head in self.heads.heads if (head.call, head.head) in rows]
        own = np.zeros(task.prompt.size, dtype=np.float32)
        if here:
            own = importance_of(rows, here, task.template, self.config.pool_width)
        found = np.append(own, np.float32(len(here)))
        if self.ranks is not None:
            found = self.ranks.total(found)
        if round(float(found[-1])) < len(self.heads.heads):
            raise SparseUnsupportedError("a calibrated head of the draft does not see the whole prompt")
        return found[:-1]


def _ask_again(draft: nn.Module, task: ToScore, capture: HeadCapture) -> None:
    """Feed what asks behind the prompt, capturing; the cache ends where it was."""
    undo, Q = Undo(task.cache), task.again.size
    with capture.of_passage(task.prompt.size + Q, Q, slice(0, Q)):
        draft(mx.array(task.again)[None], cache=task.cache)
    mx.eval([part.state for part in task.cache], list(capture.found.values()))
    undo.restore(Q)


def importance_of(
    rows: Mapping[tuple[int, int], Floats], heads: Sequence[Head], template: npt.NDArray[np.bool_] | None, width: int
) -> Floats:
    """Importance (M,) float32 from attention rows (M,) per (call, head), a head without attention left out.

    Args:
        template: (M,) tokens that are no matter of choice; what heads look at there does not count.
        width: taps of the mean over neighbouring tokens.
    """
    total = np.zeros_like(next(iter(rows.values())), dtype=np.float32)
    for head in heads:
        row = rows[head.call, head.head]
        open_to_choice = row if template is None else np.where(template, np.float32(0), row)
        mass = float(open_to_choice.sum())
        if mass != 0:  # one that is not finite goes on to be refused
            total += np.float32(head.weight / mass) * open_to_choice
    return np.array(pool(mx.array(total), width))
