"""Scoring by a draft with another tokenizer: converts the prompt to its tokens, and the scores back."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..adapters.tokens.text_mapping import DraftText, TextMapping
from ..arrays import Spans
from .scorer import Scores, ScoringInput


@dataclass(frozen=True)
class MappedTask:
    """A scoring task in the draft's tokens, and the way back.

    Attributes:
        lines: the target's tokens of each of the task's lines.
    """

    task: ScoringInput
    text: DraftText
    lines: Spans

    def scores(self, found: Scores) -> Scores:
        """Convert scores to the target's tokens. Drops the draft's look-ahead and cache, which the target can't use."""
        N = found.importance.size
        known = int(np.searchsorted(self.text.target_spans[:, 1], self.text.draft_spans[N - 1, 1], side="right"))
        importance = self.text.importance(np.pad(found.importance, (0, self.text.tokens.size - N)))[:known]
        words = f"{found.words}, mapped by text"
        ends = self.text.draft_spans[found.places, 1]
        places = np.searchsorted(self.text.target_spans[:, 1], ends, side="left").astype(np.int32)
        mapped = replace(found, importance=importance, scorer="mapped-draft", words=words, lookahead=(), cache=[])
        return replace(mapped, places=places, lines=self.lines)


def map_task(mapping: TextMapping, task: ScoringInput) -> MappedTask:
    """Convert a task to the draft's tokens.

    Raises:
        SparseUnsupportedError: the prompt has no text.
    """
    text = mapping.read(task.prompt)
    template = text.mask(task.template)
    template[0] = True  # a sink, whatever the target's first token is
    stops = frozenset(int(token) for token in mapping.tokenizer.eos_token_ids)
    question = text.span(*task.question)
    lines, asked = task.lines, tuple(mapping.read(q).tokens for q in task.questions)
    task = replace(task, again=text.spans(task.again), lines=text.spans(lines), questions=asked)
    task = replace(task, prompt=text.tokens, question=question, template=template, stop_ids=stops)
    return MappedTask(task, text, lines)
