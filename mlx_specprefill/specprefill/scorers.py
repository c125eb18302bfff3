"""Which scorer a rule means for a draft. The selection's side of a rule is `EngineConfig.selection_by`."""

from __future__ import annotations

from ..adapters.heads import DraftHeads
from ..config import RuleName, ScoringConfig
from ..distributed.ranks import Ranks
from .head_scorer import HeadScorer
from .paper_scorer import PaperScorer
from .scorer import Scorer

__all__ = ["scorer_for"]


def scorer_for(rule: RuleName, heads: DraftHeads | None, config: ScoringConfig, ranks: Ranks | None = None) -> Scorer:
    """The paper's scorer where that is asked for, and where no heads of the draft are known.

    Args:
        ranks: over which the draft's attention heads are split; None: they are all here.
    """
    if rule == "paper" or heads is None:
        return PaperScorer(config, ranks)
    return HeadScorer(heads, config, ranks)
