"""A draft with another tokenizer: the question asked in its tokens, its answer given in the target's."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

import mlx.nn as nn
import numpy as np

from ..adapters.text_mapping import TextMapping
from ..request import Progress
from .overlap import Overlap
from .scorer import Scorer, Scores, ToScore

__all__ = ["MappedScorer", "MappedTask", "map_task"]


@dataclass(frozen=True)
class MappedTask:
    """What the draft is asked, in its own tokens, and the way back."""

    task: ToScore
    overlap: Overlap

    def scores(self, found: Scores) -> Scores:
        """In the target's tokens. What the draft would go on with, and its cache, are no use to the target."""
        importance = self.overlap.importance(found.importance)
        words = f"{found.words}, mapped by text"
        return replace(found, importance=importance, scorer="mapped-draft", words=words, lookahead=(), cache=[])


def map_task(mapping: TextMapping, task: ToScore) -> MappedTask:
    """
    Raises:
        SparseUnsupportedError: the prompt has no text.
    """
    text = mapping.read(task.prompt)
    overlap = Overlap(text.target_ends, text.draft_ends)
    template = None
    if task.template is not None:
        template = overlap.mask(task.template)
        template[0] = True  # a sink, whatever the target's first token stands for
    stops = frozenset(int(token) for token in mapping.tokenizer.eos_token_ids)
    question = overlap.span(*task.question)
    none = np.zeros(0, dtype=np.int32)  # the draft has other ids for what asks
    task = replace(task, again=none)
    return MappedTask(replace(task, prompt=text.tokens, question=question, template=template, stop_ids=stops), overlap)


@dataclass(frozen=True)
class MappedScorer:
    """A scorer for the target's prompts by a draft with another tokenizer. The task's cache is the draft's."""

    inner: Scorer
    mapping: TextMapping

    def score(self, draft: nn.Module, task: ToScore) -> Generator[Progress, None, Scores]:
        """See `Scorer`; progress counts the draft's tokens."""
        mapped = map_task(self.mapping, task)
        return mapped.scores((yield from self.inner.score(draft, mapped.task)))
