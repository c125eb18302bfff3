"""How much of a prompt a draft has to keep: measured on questions whose answers are known. See `share`."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .._steps import Steps
from ..adapters.heads import DraftHeads
from ..adapters.shares import MULTIPLES, ShareCurve
from ..adapters.text_mapping import TextMapping
from ..cache.fingerprint import model_identity
from ..config import ScoringConfig, SelectionConfig
from ..distributed.ranks import ALONE, Ranks
from ..errors import SparseUnsupportedError
from ..loading import ModelPair
from .calibration_items import CalibrationItem
from .head_calibration import passage_mask, rendered, store_heads, stored_heads
from .head_scorer import HeadScorer
from .mapped import MappedScorer
from .scorer import Scorer, ToScore, question_span
from .selector import ordinary_of, select_tokens
from .share import choose_share
from .share_items import SHARE_KINDS, share_items
from .text import PromptText, TextReader

__all__ = ["find_shares", "with_calibrated_shares"]

log = logging.getLogger(__name__)

_KEEP = Fraction(1, 5)
_MARGIN = 0.5  # the lowest of 57 is not the lowest of all: 6.7 and 4.0 in two draws
ITEMS = 57  # of each kind: 399 may have 4 misses for a loss of .02, 1 % of them


def find_shares(
    draft: nn.Module,
    tokenizer: TokenizerWrapper,
    heads: DraftHeads,
    scoring: ScoringConfig,
    selection: SelectionConfig,
    on_progress: Callable[[int, int], None] | None = None,
    items: int = ITEMS,
    seed: int = 1,
    mapping: TextMapping | None = None,
    ranks: Ranks = ALONE,
) -> DraftHeads:
    """Let the draft read prompts of 300 to 1000 tokens: what every multiple loses of their answers, and how far codes
    that are asked for stand out, which is half of what the least of them does.

    Args:
        draft: as it scores.
        tokenizer: the target's.
        on_progress: gets the number of items read and that of all.
        items: of each kind.
        seed: of the items; not that of the items by which the heads were chosen.
        mapping: to the draft's tokens, where these are others.
        ranks: over which the draft's heads are split.

    Raises:
        SparseUnsupportedError: a calibrated head does not see the whole prompt.
    """
    asked, reader = list(share_items(items, seed)), TextReader(tokenizer)
    misses, kept, of_kind = np.zeros(len(MULTIPLES), dtype=np.int64), np.zeros(len(MULTIPLES)), Counter[str]()
    standing, by_sentence = math.inf, replace(selection, over_lines=True)
    scorer: Scorer = HeadScorer(heads, scoring, ranks)
    scorer = scorer if mapping is None else MappedScorer(scorer, mapping)
    for number, item in enumerate(asked, 1):
        seen = _seen(draft, tokenizer, reader, scorer, scoring, item)
        lost, shares = _outcomes(seen, by_sentence)
        if item.kind == "needle":
            standing = min(standing, _standing(seen, selection))
        misses += lost
        kept += shares
        of_kind[item.kind] += int(lost[MULTIPLES.index(1.0)])
        if on_progress is not None:
            on_progress(number, len(asked))
    mx.clear_cache()
    log.info("items on which a multiple of 1 loses something, of %d: %s", items, {k: of_kind[k] for k in SHARE_KINDS})
    curve = ShareCurve(len(asked), tuple(misses.tolist()), tuple((kept / len(asked)).tolist()), over_lines=True)
    return replace(heads, shares=curve, stands_out=max(1.0, _MARGIN * standing) if standing < math.inf else None)


def with_calibrated_shares(
    pair: ModelPair,
    scoring: ScoringConfig,
    selection: SelectionConfig,
    folder: Path | None,
    *,
    measure: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
) -> ModelPair:
    """The pair with what its draft loses when shares are chosen per prompt: known with its heads, from an earlier
    calibration, or measured now and kept for the next time. Of several ranks, as rank 0 knows it.

    The pair as it is without calibrated heads, where nothing is known and `measure` is false, and where a head of the
    draft does not see the whole prompt, which is logged.

    Args:
        folder: where calibrations are kept, a file per draft; None: nowhere.
    """
    heads = pair.agree("shares", lambda: _with_shares(pair, scoring, selection, folder, measure, on_progress))
    return replace(pair, heads=heads)


def _with_shares(
    pair: ModelPair,
    scoring: ScoringConfig,
    selection: SelectionConfig,
    folder: Path | None,
    measure: bool,
    on_progress: Callable[[int, int], None] | None,
) -> DraftHeads | None:
    heads = pair.heads
    if pair.draft is None or heads is None or heads.shares is not None or pair.sparse_refusal is not None:
        return heads
    file = None if folder is None else folder / f"{_identity(pair, pair.draft)}-shares.json"
    known = pair.split.agree("known shares", lambda: stored_heads(file))
    if known is not None and known.shares is not None and _found(known) == _found(heads):
        return known
    if not measure:
        return heads
    try:
        heads = find_shares(
            pair.draft,
            pair.tokenizer,
            heads,
            scoring,
            selection,
            on_progress,
            mapping=pair.mapping,
            ranks=pair.split,
        )
    except SparseUnsupportedError as error:
        log.warning("how much to keep can't be chosen per prompt: %s", error)
        return heads
    store_heads(file, heads)
    return heads


def _identity(pair: ModelPair, draft: nn.Module) -> str:
    """The draft's, and the target's where shares are counted in tokens of another tokenizer."""
    identity = model_identity(draft, pair.draft_config or {})
    return identity if pair.mapping is None else f"{identity}-for-{model_identity(pair.target, pair.target_config)}"


def _found(heads: DraftHeads) -> dict[str, Any]:
    """What was chosen before its shares were measured."""
    return replace(heads, shares=None, stands_out=None).to_dict()


@dataclass(frozen=True)
class _Seen:
    """One item as the draft scored it; arrays are (M,), `gold` are indices of what the answer needs."""

    question: str
    importance: npt.NDArray[np.float32]
    forced: npt.NDArray[np.bool_]
    text: PromptText
    gold: npt.NDArray[np.intp]


def _seen(
    draft: nn.Module,
    tokenizer: TokenizerWrapper,
    reader: TextReader,
    scorer: Scorer,
    scoring: ScoringConfig,
    item: CalibrationItem,
) -> _Seen:
    prompt, places = rendered(tokenizer, item)
    text = reader.read(prompt.tolist())
    question = question_span(prompt.size, scoring, places["question"][1], text.units)
    forced = ~passage_mask(prompt.size, places["document"])
    gold = passage_mask(prompt.size, *(place for name, place in places.items() if name.startswith("gold")))
    task = ToScore.alone(draft, prompt, scoring, question=question, template=forced)
    importance = Steps(scorer.score(draft, task)).finish().importance
    return _Seen(item.question, importance, forced, text, np.flatnonzero(gold))


def _outcomes(seen: _Seen, selection: SelectionConfig) -> tuple[np.ndarray, np.ndarray]:
    """Per multiple, whether something that the answer needs would not have been kept, and the share of chunks."""
    lost, shares = np.zeros(len(MULTIPLES), dtype=np.bool_), np.zeros(len(MULTIPLES))
    scored = seen.importance, seen.forced, seen.text
    for index, multiple in enumerate(MULTIPLES):
        share = choose_share(*scored, seen.question, multiple, selection).share
        shares[index] = float(share)
        if share < 1:
            kept = select_tokens(*scored, share, selection).kept
            lost[index] = not np.isin(seen.gold, kept).all()
    return lost, shares


def _standing(seen: _Seen, selection: SelectionConfig) -> float:
    """How many times the importance of the best tokens that are not chosen the best token of the answer has."""
    chosen = select_tokens(seen.importance, seen.forced, seen.text, _KEEP, selection)
    others = np.ones(seen.forced.size, dtype=np.bool_)
    others[chosen.kept] = False
    ordinary = ordinary_of(chosen.asked, others)
    return float(chosen.asked[seen.gold].max()) / ordinary if ordinary > 0 else math.inf
