"""The requests of every arm for one prompt, and the share of its gold that was kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from mlx_specprefill import CacheLabel, Engine, GenerationRequest, Inspection, RuleName, SpecPrefillOptions
from mlx_specprefill_server.prompt.builder import Prompt

from . import rankings
from .arms import FULL, Arm

OWNER = "evaluation"  # of all that is cached meanwhile
QUESTION_TOKENS = 64  # at the end of the last message, at most: the query of the lexical arm
_IN_A_LABEL = str.maketrans("@.", "-_")
CHUNK = 32  # tokens that arms without a draft choose at a time, as published

Span = tuple[int, int]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


class Prompted:
    """Args:
    gold: token spans that hold what the answer needs.
    seed: of the random arm.
    mentions: all places of each word of the answer that occurs in the prompt.
    session: a turn of a conversation. Arms that ask the draft follow their earlier turns as when they serve; those
        that bring scores along start over at every turn.

    Each arm has its own cache label: what one leaves behind neither helps nor hinders another. The draft's label is
    one, so that it reads the prompt once for all.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        gold: Sequence[Span],
        answer_tokens: int,
        seed: int,
        mentions: Sequence[Sequence[Span]] = (),
    ) -> None:
        self.engine = engine
        self.prompt = prompt
        self.gold = gold
        self.answer_tokens = answer_tokens
        self.seed = seed
        self.mentions = mentions
        self.chunk = engine.config.selection.chunk_size
        self._inspections: dict[RuleName, Inspection] = {}

    def inspection(self, rule: RuleName = "default") -> Inspection:
        """Ask the draft once per rule, for all shares."""
        if rule not in self._inspections:
            options = SpecPrefillOptions(enabled=True, rule=rule)
            self._inspections[rule] = self.engine.inspect(self._request(options, "draft"))
        return self._inspections[rule]

    def request(self, arm: Arm) -> GenerationRequest:
        return self._request(self._options(arm), arm.name.translate(_IN_A_LABEL))

    def _request(self, options: SpecPrefillOptions, label: str) -> GenerationRequest:
        request = self.prompt.request(self.answer_tokens, options)
        return replace(request, stop_token_ids=self.engine.pair.eos_token_ids, label=CacheLabel(OWNER, label))

    def _options(self, arm: Arm) -> SpecPrefillOptions:
        if arm == FULL:
            return SpecPrefillOptions(enabled=False, return_spans=True)
        options = SpecPrefillOptions(True, arm.keep, return_spans=True, rule=arm.rule, estimate=arm.estimates)
        M = len(self.prompt.tokens)
        score: dict[str, Callable[[], Floats]] = {
            "sparse": lambda: self.inspection().importance,
            "absent": lambda: self.inspection().importance,
            "paper": lambda: self.inspection("paper").importance,
            "random": partial(rankings.random_chunks, M, CHUNK, self.seed),
            "random-absent": partial(rankings.random_chunks, M, CHUNK, self.seed),
            "recency": partial(rankings.by_recency, M),
            "lexical": self._by_words,
            "oracle": partial(rankings.gold_first, M, CHUNK, self.gold or self._newest_mentions(), self.seed),
        }
        return replace(options, importance=score[arm.kind]())

    def _by_words(self) -> Floats:
        tokens, decode = self.prompt.tokens, self.engine.pair.tokenizer.decode
        passages = [decode(tokens[at : at + CHUNK]) for at in range(0, len(tokens), CHUNK)]
        return rankings.by_words(len(tokens), passages, CHUNK, self._question())

    def _question(self) -> str:
        """Return the question: the last paragraph of the last message, or the end of a long one."""
        end = self.prompt.spans[-1].content_end if self.prompt.spans else len(self.prompt.tokens)
        asked = self.engine.pair.tokenizer.decode(self.prompt.tokens[max(0, end - QUESTION_TOKENS) : end])
        return str(asked).rsplit("\n\n", 1)[-1]

    # --- measures ----------------------------------------------------------------------------------------------------

    def _newest_mentions(self) -> list[Span]:
        return [places[-1] for places in self.mentions]

    def found(self, arm: Arm, spans: Sequence[Span]) -> dict[str, float]:
        """Return the shares of gold and of mentions that were kept, as far as the prompt has any."""
        if arm == FULL:
            return {}
        kept = self.mask(spans)
        named = [any(kept[start:end].all() for start, end in places) for places in self.mentions]
        return self._recall(kept) | ({"mentioned": sum(named) / len(named)} if named else {})

    def _recall(self, kept: Bools) -> dict[str, float]:
        """Return the share of chunks with gold whose gold was kept."""
        if not self.gold:
            return {}
        gold = self.mask(self.gold)
        starts = np.arange(0, kept.size, self.chunk)
        needed = np.add.reduceat(gold, starts, dtype=np.int64)
        found = np.add.reduceat(gold & kept, starts, dtype=np.int64)
        return {"recall": float((found == needed)[needed > 0].mean())}

    def mask(self, spans: Sequence[Span]) -> Bools:
        mask = np.zeros(len(self.prompt.tokens), dtype=np.bool_)
        for start, end in spans:
            mask[start:end] = True
        return mask
