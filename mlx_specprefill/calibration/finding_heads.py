"""Finds the heads of a draft that attend from a question to its answer, on items made here, and stores them.

The items are of three kinds: copy a sentence of the text, a code inserted into it (needle), and a fact whose question
shares no word with it (paraphrase). The text is docstrings of the standard library, so none has to be shipped.

A head's gain is the share of its attention from the question to the document that falls on the answer, less the share
of a uniform distribution (after QRHead, arXiv 2506.09944). For every depth, calibration tries several numbers of the
heads with the best gain, and takes the number with the best recall. Of the depths with the best recall it takes the
smallest.
"""

from __future__ import annotations

import json
import logging
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .._files import read_object, replace_text
from ..adapters.capture import HeadCapture
from ..adapters.depth import first_layers, full_draft_model, layers_of, smallest_depth
from ..arrays import Bools, Floats
from ..cache.positioned import leaves
from ..cache.prefix.identity import model_identity
from ..config import ScoringConfig, SelectionConfig
from ..distributed.ranks import Ranks, broadcast
from ..errors import SparseUnsupportedError
from ..pair import ModelPair
from ..request import TokenIds
from ..selection.heads import DraftHeads, Head
from ..selection.plan import ForcedRange, forced_mask
from ..selection.question_lines import question_span
from ..selection.scorer import ScoringInput, importance_of, read_prompt
from ..selection.selector import select_tokens
from ..selection.text import PromptText, TextReader
from .fitting_probe import fit_probe
from .texts import docstrings, located, rendered

log = logging.getLogger(__name__)

Rows = dict[tuple[int, int], Floats]

_ITEMS, _CHARACTERS = 12, 2600  # per kind; some 600 to 800 tokens
_FEWEST = 4  # per kind, whatever the time
LIMIT_S = 60.0
_KEEP = Fraction(1, 5)
_NUMBERS = (1, 2, 4, 8, 16)  # of heads to try
_EQUAL = 0.02  # difference in recall that counts as none

KINDS = ("copy", "needle", "paraphrase")
_SENTENCE = re.compile(r"[A-Z][^.\n]*(?:\n[^.\n]+)*\.?")
_SYLLABLES = "ba ce di fo gu ha ki lo mu ne pa ri so tu va we zo".split()
# A fact and a question about it, without a shared content word.
_FACTS = (
    ("The ferry leaves the harbour at seven each morning.", "When does the boat depart every day?"),
    ("Marta keeps the spare key beneath the blue flowerpot.", "Where is the extra door opener hidden?"),
    ("The physician told Edwin to stop eating peanuts.", "Which food did his doctor forbid?"),
    ("Lucas repairs bicycles in a shed behind the bakery.", "What does the mechanic fix for a living?"),
    ("Our cat is afraid of the vacuum cleaner.", "What frightens the household pet?"),
    ("The museum purchased the painting for nine thousand dollars.", "How much money was paid for this artwork?"),
    ("Grandfather was born in a village near Krakow.", "Where did the old man come into the world?"),
    ("The committee postponed the election until October.", "To which month was voting moved?"),
    ("Heavy rain washed away the wooden bridge on Tuesday.", "Which weekday did a storm destroy that crossing?"),
    ("The pilot spoke Portuguese with the crew.", "In what language did the aviator talk to colleagues?"),
    ("Sarah swapped her piano for a pair of skis.", "What did the musician get in exchange for an instrument?"),
    ("The bakery closes early because the oven is broken.", "Why does the bread shop shut sooner than usual?"),
)


@dataclass(frozen=True)
class CalibrationItem:
    """A document, a question about it, and the passage with the answer."""

    kind: str
    document: str
    question: str
    gold: str


def calibration_items(number: int, characters: int, seed: int = 0) -> Iterator[CalibrationItem]:
    """Yield `number` items of each kind in turn, with documents of `characters` characters. Same Python, same items."""
    makers = {"copy": _copy, "needle": _needle, "paraphrase": _paraphrase}
    for index in range(number):
        for kind in KINDS:
            rng = random.Random(f"{kind}/{seed}/{index}")
            yield makers[kind](rng, _document(rng, characters))


def _document(rng: random.Random, characters: int) -> str:
    """Return consecutive docstrings of `characters` characters in total."""
    passages = docstrings() or tuple(fact for fact, _ in _FACTS)
    start, parts, size = rng.randrange(len(passages)), list[str](), 0
    while size < characters:
        part = passages[(start + len(parts)) % len(passages)][: characters - size]
        parts.append(part)
        size += len(part) + 2
    return "\n\n".join(parts)


def _copy(rng: random.Random, text: str) -> CalibrationItem:
    found = [m.group() for m in _SENTENCE.finditer(text) if 15 <= len(m.group().split()) <= 40]
    unique = [sentence for sentence in found if sentence.endswith(".") and text.count(sentence) == 1]
    if not unique:
        return _needle(rng, text)
    gold = rng.choice(unique)
    beginning = " ".join(gold.split()[:6])
    return CalibrationItem("copy", text, f'Copy the sentence of the text that begins with "{beginning}".', gold)


def _needle(rng: random.Random, text: str) -> CalibrationItem:
    name = "".join(rng.choices(_SYLLABLES, k=3)).capitalize()
    gold = f"The secret code for {name} is {rng.randrange(100000, 999999)}."
    return CalibrationItem("needle", _insert(rng, text, gold), f"What is the secret code for {name}?", gold)


def _paraphrase(rng: random.Random, text: str) -> CalibrationItem:
    gold, question = rng.choice(_FACTS)
    return CalibrationItem("paraphrase", _insert(rng, text, gold), question, gold)


def _insert(rng: random.Random, text: str, line: str) -> str:
    """Insert the line anywhere but at the text's beginning."""
    lines = text.split("\n")
    lines.insert(rng.randint(1, max(1, len(lines) - 1)), line)
    return "\n".join(lines)


@dataclass(frozen=True)
class _Read:
    """One item as read by the draft: attention rows of all heads, and masks of the prompt's parts."""

    kind: str
    rows: Rows
    gold: Bools
    template: Bools
    text: PromptText


def find_heads(
    draft: nn.Module,
    tokenizer: TokenizerWrapper,
    scoring: ScoringConfig,
    selection: SelectionConfig,
    on_progress: Callable[[int, int], None] | None = None,
    limit_s: float = LIMIT_S,
    ranks: Ranks | None = None,
) -> DraftHeads:
    """Calibrate a draft on three dozen prompts of some 700 tokens, or fewer if that takes too long.

    Args:
        draft: the whole model.
        on_progress: called with the number of items read and of all items; then of the probe's prompts.
        limit_s: seconds after which reading stops, once there are four items of each kind; as many for the probe.
        ranks: over which the draft's heads are split; None: they are all here.

    Raises:
        SparseUnsupportedError: none of its heads can be calibrated.
    """
    eligible = eligible_calls(draft)
    reader = TextReader(tokenizer)
    items, reads = list(calibration_items(_ITEMS, _CHARACTERS)), list[_Read]()
    until = time.monotonic() + limit_s
    for item in items:
        if len(reads) >= _FEWEST * len(KINDS) and broadcast(ranks, "time is up", lambda: time.monotonic() > until):
            break
        read = _read(draft, tokenizer, reader, item, scoring, ranks)
        reads.append(replace(read, rows={key: row for key, row in read.rows.items() if key[0] in eligible}))
        if on_progress is not None:
            on_progress(len(reads), len(items))
        if len(reads) % len(KINDS) == 0:
            log.info("calibrating the draft's heads, once: %d of at most %d items read", len(reads), len(items))
    mx.clear_cache()
    if not reads or not reads[0].rows:
        raise SparseUnsupportedError("no attention layer of the draft sees the whole prompt")
    found = _choose_heads(draft, reads, scoring, selection)
    if ranks is not None:  # each holds a part of the values
        return found
    return replace(found, probe=fit_probe(first_layers(draft, found.depth), tokenizer, limit_s, on_progress))


def calibrated_heads(
    pair: ModelPair,
    scoring: ScoringConfig,
    selection: SelectionConfig,
    folder: Path | None,
    *,
    measure: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
) -> DraftHeads | None:
    """Return the draft's heads from an earlier calibration, else calibrate and store them.

    Rank 0 decides, with the other ranks' help if the draft is spread over them. Returns None without a draft that can
    score, without a stored calibration if `measure` is false, and if none of its heads can be calibrated (logged).

    Args:
        folder: where calibrations are kept, a file per draft; None: nowhere.
    """

    def find() -> DraftHeads | None:
        if pair.draft is None or pair.sparse_refusal is not None:
            return None
        draft = full_draft_model(pair.draft)
        file = None if folder is None else folder / f"{model_identity(draft, pair.draft_config or {})}.json"
        known = broadcast(pair.split, "known heads", lambda: _stored_heads(file))
        if known is not None or not measure:
            return known
        try:
            found = find_heads(draft, pair.draft_tokenizer, scoring, selection, on_progress, ranks=pair.split)
        except SparseUnsupportedError as error:
            log.warning("the draft's heads can't be calibrated, so the paper's rule scores prompts: %s", error)
            return None
        _store_heads(file, found)
        return found

    return pair.broadcast("heads", find)


def _stored_heads(file: Path | None) -> DraftHeads | None:
    """Return the heads stored in this file; None if there are none, or the file is unreadable (logged)."""
    values = {} if file is None else read_object(file)
    try:
        return DraftHeads.from_dict(values) if "probe" in values else None  # earlier ones had none
    except ValueError as error:
        log.warning("%s: calibrating again: %s", file, error)
        return None


def _store_heads(file: Path | None, heads: DraftHeads) -> None:
    """Store the heads in this file, if there is one. A failure is logged."""
    if file is None:
        return
    try:
        replace_text(file, json.dumps(heads.to_dict()))
    except OSError as error:
        log.warning("the calibration could not be kept: %s", error)


def _choose_heads(
    draft: nn.Module, reads: Sequence[_Read], scoring: ScoringConfig, selection: SelectionConfig
) -> DraftHeads:
    """Choose heads for every depth, and return those of the fewest layers whose recall is the best or equal to it."""
    ranked, layers, leading = _rank_heads(reads), len(layers_of(draft)), list[Head]()
    tried: list[DraftHeads] = []
    for depth in range(smallest_depth(draft), layers + 1):
        calls = _calls(first_layers(draft, depth))
        reached = [head for head in ranked if head.call < calls][: max(_NUMBERS)]
        if reached != leading:
            leading = reached
            heads, recall = _best_number(leading, reads, scoring, selection)
            tried.append(DraftHeads(heads, depth, layers, recall))
    if not tried:
        raise SparseUnsupportedError("no head of the draft looks from a question at its answer")
    enough = max(_mean(heads.recall) for heads in tried) - _EQUAL
    return next(heads for heads in tried if _mean(heads.recall) >= enough)


def _best_number(
    heads: Sequence[Head], reads: Sequence[_Read], scoring: ScoringConfig, selection: SelectionConfig
) -> tuple[tuple[Head, ...], dict[str, float]]:
    """Return the number of leading heads with the best recall, more rather than fewer, and that recall."""
    tried = [tuple(heads[:number]) for number in _NUMBERS if number <= len(heads)]
    recalls = [(some, _recall(some, reads, scoring, selection)) for some in tried]
    return max(recalls, key=lambda entry: (round(_mean(entry[1]), 3), len(entry[0])))


def _rank_heads(reads: Sequence[_Read]) -> list[Head]:
    """Return heads with a positive mean gain over the kinds of items, by descending gain."""
    gains: dict[tuple[int, int], list[float]] = {}
    for kind in dict.fromkeys(read.kind for read in reads):
        of_kind = [read for read in reads if read.kind == kind]
        for key in of_kind[0].rows:
            gains.setdefault(key, []).append(float(np.mean([_gain(read, key) for read in of_kind])))
    heads = [Head(*key, float(np.mean(values))) for key, values in gains.items()]
    return sorted((head for head in heads if head.weight > 0), key=lambda head: -head.weight)


def _gain(read: _Read, key: tuple[int, int]) -> float:
    document = ~read.template
    row = read.rows[key] * document
    mass = float(row.sum())
    return float(row[read.gold].sum()) / mass - float(read.gold.sum() / document.sum()) if mass > 0 else 0.0


def _recall(
    heads: Sequence[Head], reads: Sequence[_Read], scoring: ScoringConfig, selection: SelectionConfig
) -> dict[str, float]:
    """Return the mean share of gold tokens kept, by kind."""
    shares: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for read in reads:
        importance = np.array(importance_of(read.rows, heads, read.template, scoring.pool_width))
        kept = select_tokens(importance, read.template, read.text, _KEEP, selection).kept
        shares[read.kind].append(float(np.isin(np.flatnonzero(read.gold), kept).mean()))
    return {kind: float(np.mean(values)) for kind, values in shares.items() if values}


def _mean(recall: Mapping[str, float]) -> float:
    return float(np.mean(list(recall.values())))


# --- the draft's layers ----------------------------------------------------------------------------------------------


def _calls(model: nn.Module) -> int:
    """Return the attention calls of a forward. Computes nothing."""
    capture = HeadCapture(2, {})
    with capture.of_passage(2, 2, slice(0, 2)):
        model(mx.zeros((1, 2), dtype=mx.int32), cache=make_prompt_cache(model))
    return capture.calls


def eligible_calls(draft: nn.Module) -> set[int]:
    """Return the attention calls that see the whole prompt. Windows are excluded: in a short prompt they look the same.

    Raises:
        SparseUnsupportedError: windows and attention calls can't be matched.
    """
    caches = [part for part in leaves(make_prompt_cache(draft)) if not isinstance(part, ArraysCache)]
    calls, whole = _calls(draft), [type(part) is KVCache for part in caches]
    if all(whole):
        return set(range(calls))
    if len(whole) != calls:
        raise SparseUnsupportedError(f"its {calls} attention calls can't be matched with {len(whole)} caches")
    return {call for call, spans in enumerate(whole) if spans}


# --- items -----------------------------------------------------------------------------------------------------------


def _read(
    draft: nn.Module,
    tokenizer: TokenizerWrapper,
    reader: TextReader,
    item: CalibrationItem,
    scoring: ScoringConfig,
    ranks: Ranks | None,
) -> _Read:
    prompt, places = _render(tokenizer, item)
    units = reader.read(prompt.tolist())
    question = question_span(prompt.size, scoring, places["question"][1], units.units)
    cache = list(make_prompt_cache(draft))
    document, gold = (forced_mask([ForcedRange(*places[name], name)], prompt.size) for name in ("document", "gold"))
    task = ScoringInput(prompt, question, ~document, frozenset(), cache, lambda: scoring.prefill_step)
    capture = HeadCapture(prompt.size, None, 0 if ranks is None else ranks.rank)
    for _ in read_prompt(draft, task, prompt.size, question, capture.of_passage):
        pass
    rows = _of_all(capture, ranks)
    return _Read(item.kind, rows, gold, ~document, units)


def _of_all(capture: HeadCapture, ranks: Ranks | None) -> Rows:
    """Return the rows of all ranks' heads."""
    if not capture.attention:
        return {}
    here = list(capture.attention)
    rows = mx.stack([capture.attention[key] for key in here])
    if ranks is None:
        return dict(zip(here, np.array(rows), strict=True))
    counts = Counter(call for call, _ in here)
    numbers = [(call, head + (rank - ranks.rank) * counts[call]) for rank in range(ranks.size) for call, head in here]
    return dict(zip(numbers, np.array(ranks.all_gather(rows)), strict=True))


def _render(tokenizer: TokenizerWrapper, item: CalibrationItem) -> tuple[TokenIds, dict[str, tuple[int, int]]]:
    """Return the prompt's tokens, and the ranges of "document", "question" and "gold"."""
    content = f"{item.document}\n\n{item.question}"
    text = rendered(tokenizer, [{"role": "user", "content": content}])
    start = max(text.rfind(content), 0)
    question, gold = start + len(item.document) + 2, start + item.document.index(item.gold)
    places = {
        "document": (start, start + len(item.document)),
        "question": (question, question + len(item.question)),
        "gold": (gold, gold + len(item.gold)),
    }
    return located(tokenizer, text, places)
