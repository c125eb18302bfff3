"""How much of a prompt a draft has to keep: measured on questions whose answers are known. See `share`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .._steps import Steps
from ..adapters.heads import DraftHeads
from ..adapters.shares import MULTIPLES, ShareCurve
from ..cache.fingerprint import model_identity
from ..config import ScoringConfig, SelectionConfig
from ..errors import SparseUnsupportedError
from ..loading import ModelPair
from .calibration_items import CalibrationItem
from .head_calibration import passage_mask, rendered, store_heads, stored_heads
from .head_scorer import HeadScorer
from .scorer import ToScore, question_span
from .selector import select_tokens
from .share import choose_share
from .share_items import SHARE_KINDS, share_items
from .text import TextReader

__all__ = ["find_share_curve", "with_calibrated_shares"]

log = logging.getLogger(__name__)

ITEMS = 57  # of each kind: 399 may have 4 misses for a loss of .02, 1 % of them


def find_share_curve(
    draft: nn.Module,
    tokenizer: TokenizerWrapper,
    heads: DraftHeads,
    scoring: ScoringConfig,
    selection: SelectionConfig,
    on_progress: Callable[[int, int], None] | None = None,
    items: int = ITEMS,
    seed: int = 1,
) -> ShareCurve:
    """Let the draft read prompts of 300 to 1000 tokens and see what every multiple would have kept of their answers.

    Args:
        draft: as it scores.
        on_progress: gets the number of items read and that of all.
        items: of each kind.
        seed: of the items; not that of the items by which the heads were chosen.

    Raises:
        SparseUnsupportedError: a calibrated head does not see the whole prompt.
    """
    asked, reader = list(share_items(items, seed)), TextReader(tokenizer)
    misses, kept, of_kind = np.zeros(len(MULTIPLES), dtype=np.int64), np.zeros(len(MULTIPLES)), Counter[str]()
    scorer = HeadScorer(heads, scoring)
    for number, item in enumerate(asked, 1):
        lost, shares = _outcomes(draft, tokenizer, reader, scorer, item, selection)
        misses += lost
        kept += shares
        of_kind[item.kind] += int(lost[MULTIPLES.index(1.0)])
        if on_progress is not None:
            on_progress(number, len(asked))
    mx.clear_cache()
    log.info("items on which a multiple of 1 loses something, of %d: %s", items, {k: of_kind[k] for k in SHARE_KINDS})
    return ShareCurve(len(asked), tuple(int(m) for m in misses), tuple(float(k) for k in kept / len(asked)))


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
    calibration, or measured now and kept for the next time.

    The pair as it is without calibrated heads, where nothing is known and `measure` is false, and where a head of the
    draft does not see the whole prompt, which is logged.

    Args:
        folder: where calibrations are kept, a file per draft; None: nowhere.
    """
    heads = pair.heads
    if pair.draft is None or heads is None or heads.shares is not None or pair.sparse_refusal is not None:
        return pair
    name = f"{model_identity(pair.draft, pair.draft_config or {})}-shares.json"
    file = None if folder is None else folder / name
    known = stored_heads(file)
    if known is not None and known.shares is not None and replace(known, shares=None).to_dict() == heads.to_dict():
        return replace(pair, heads=replace(heads, shares=known.shares))
    if not measure:
        return pair
    try:
        found = find_share_curve(pair.draft, pair.tokenizer, heads, scoring, selection, on_progress)
    except SparseUnsupportedError as error:
        log.warning("how much to keep can't be chosen per prompt: %s", error)
        return pair
    heads = replace(heads, shares=found)
    store_heads(file, heads)
    return replace(pair, heads=heads)


def _outcomes(
    draft: nn.Module,
    tokenizer: TokenizerWrapper,
    reader: TextReader,
    scorer: HeadScorer,
    item: CalibrationItem,
    selection: SelectionConfig,
) -> tuple[np.ndarray, np.ndarray]:
    """Per multiple, whether something that the answer needs would not have been kept, and the share of chunks."""
    prompt, places = rendered(tokenizer, item)
    text = reader.read(prompt.tolist())
    question = question_span(prompt.size, scorer.config, places["question"][1], text.units)
    forced = ~passage_mask(prompt.size, places["document"])
    gold = np.flatnonzero(
        passage_mask(prompt.size, *(place for name, place in places.items() if name.startswith("gold")))
    )
    task = ToScore.alone(draft, prompt, scorer.config, question=question, template=forced)
    importance = Steps(scorer.score(draft, task)).finish().importance
    lost, shares = np.zeros(len(MULTIPLES), dtype=np.bool_), np.zeros(len(MULTIPLES))
    for index, multiple in enumerate(MULTIPLES):
        share = choose_share(importance, forced, text, item.question, multiple, selection).share
        shares[index] = float(share)
        if share < 1:
            seen = select_tokens(importance, forced, text, Fraction(share), selection).kept
            lost[index] = not np.isin(gold, seen).all()
    return lost, shares
