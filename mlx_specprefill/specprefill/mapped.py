"""Scoring by a draft with another tokenizer: converts the prompt to its tokens, and the scores back."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

import mlx.nn as nn
import numpy as np

from ..adapters.text_mapping import TextMapping
from ..request import Progress
from .overlap import Overlap
from .scorer import Scorer, Scores, ScoringInput

__all__ = ["MappedScorer", "MappedTask", "map_task"]


@dataclass(frozen=True)
class MappedTask:
    """A scoring task in the draft's tokens, and the way back."""

    task: ScoringInput
    overlap: Overlap

    def scores(self, found: Scores) -> Scores:
        """Convert scores to the target's tokens. Drops the draft's look-ahead and cache, which the target can't use."""
        importance = self.overlap.importance(found.importance)
        words = f"{found.words}, mapped by text"
        return replace(found, importance=importance, scorer="mapped-draft", words=words, lookahead=(), cache=[])


def map_task(mapping: TextMapping, task: ScoringInput) -> MappedTask:
    """Convert a task to the draft's tokens.

    Raises:
        SparseUnsupportedError: the prompt has no text.
    """
    text = mapping.read(task.prompt)
    overlap = Overlap(text.target_ends, text.draft_ends)
    template = None
    if task.template is not None:
        template = overlap.mask(task.template)
        template[0] = True  # a sink, whatever the target's first token is
    stops = frozenset(int(token) for token in mapping.tokenizer.eos_token_ids)
    question = overlap.span(*task.question)
    none = np.zeros(0, dtype=np.int32)  # the draft has other ids for the question
    task = replace(task, again=none)
    return MappedTask(replace(task, prompt=text.tokens, question=question, template=template, stop_ids=stops), overlap)


@dataclass(frozen=True)
class MappedScorer:
    """Scores the target's prompts with a draft that has another tokenizer. The task's cache is the draft's."""

    inner: Scorer
    mapping: TextMapping

    def score(self, draft: nn.Module, task: ScoringInput) -> Generator[Progress, None, Scores]:
        """See `Scorer`; progress counts the draft's tokens."""
        mapped = map_task(self.mapping, task)
        return mapped.scores((yield from self.inner.score(draft, mapped.task)))
