"""What is known of a model before it is loaded: support, memory at usual lengths, and what each draft at hand gains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from mlx_specprefill import LoadError, predicted_gain

from .inventory import StoredModel, stored_models, support
from .needs import Need, need_of_stored

__all__ = ["LENGTHS", "Draft", "drafts_for", "facts", "memory_at"]

LENGTHS = (8192, 65536, 131072)  # tokens
_LEAST_GAIN = 1.05  # below that nobody would load a second model


@dataclass(frozen=True, slots=True)
class Draft:
    """A model at hand that could score prompts for a target; the target itself if `need` is None.

    Attributes:
        place: where it is stored, if under its id.
        gain: by length, how many times sooner the first token comes; counted, not measured.
        tokenizer: "same", "mapped" by text, or "unknown" where one of the two has no tokenizer.json.
    """

    name: str
    place: str | None
    need: Need | None
    tokenizer: str
    gain: dict[int, float | None]


def memory_at(need: Need, lengths: tuple[int, ...] = LENGTHS) -> dict[int, int | None]:
    """Bytes by length; None where that is beyond the model's context, or its cache is not known."""
    context = None if need.design is None else need.design.context
    beyond = [context is None or tokens > context or need.cache(tokens) is None for tokens in lengths]
    return {tokens: None if out else need.memory(tokens) for tokens, out in zip(lengths, beyond, strict=True)}


def drafts_for(target: Need, path: Path | None, keep: Fraction, own: Path | None = None) -> list[Draft]:
    """Every model at hand that is predicted to gain something, the best first, and the target's own first layers.

    Args:
        path: the target's files, for its tokenizer.
        own: a draft that is not stored under an id.
    """
    found = list(_drafts(target, path, keep, own))
    return sorted(found, key=lambda draft: -max(gain or 0 for gain in draft.gain.values()))


def _drafts(target: Need, path: Path | None, keep: Fraction, own: Path | None) -> Iterator[Draft]:
    first_layers = _gains(target, None, keep)
    if any(first_layers.values()):
        yield Draft("self", None, None, "same", first_layers)
    for name, place, files in _at_hand(own):
        need = None if files == path else _need(name, files)
        if need is None or need.weights >= target.weights:
            continue
        gains = _gains(target, need, keep)
        if max(gain or 0 for gain in gains.values()) >= _LEAST_GAIN:
            yield Draft(name, place, need, _tokenizers(path, files), gains)


def _at_hand(own: Path | None) -> Iterator[tuple[str, str | None, Path]]:
    """Names, places and files."""
    if own is not None:
        yield str(own), None, own
    for stored in stored_models():
        if stored.path is not None and stored.path != own:
            yield stored.id, stored.place, stored.path


def _need(name: str, files: Path) -> Need | None:
    try:
        return need_of_stored(name, files)
    except LoadError:
        return None


def _gains(target: Need, draft: Need | None, keep: Fraction) -> dict[int, float | None]:
    design = target.design
    if design is None or (draft is not None and draft.design is None):
        return dict.fromkeys(LENGTHS)
    longest = design.context if draft is None or draft.design is None else min(design.context, draft.design.context)
    scorer = None if draft is None else draft.design
    return {n: None if n > longest else predicted_gain(design, scorer, n, keep) for n in LENGTHS}


def _tokenizers(target: Path | None, draft: Path | None) -> str:
    ours, theirs = _vocabulary(target), _vocabulary(draft)
    if ours is None or theirs is None:
        return "unknown"
    return "same" if ours == theirs else "mapped"


def _vocabulary(path: Path | None) -> Any:
    """Tokens and their numbers, as tokenizer.json has them; None without that file."""
    try:
        found = json.loads(((path or Path()) / "tokenizer.json").read_text(encoding="utf-8"))
        return found["model"]["vocab"], found.get("added_tokens")
    except (OSError, ValueError, KeyError, TypeError):
        return None


def facts(
    need: Need, path: Path | None, stored: StoredModel | None, keep: Fraction, draft: Path | None
) -> dict[str, Any]:
    """Everything that `show` says, as JSON has it; arguments as of `drafts_for`."""
    design = need.design
    word, reason = support(design if design is not None else "a GGUF file is read after it was fetched")
    return {
        "id": need.name,
        "place": None if stored is None else stored.place,
        "path": None if path is None else str(path),
        "bytes": None if stored is None else stored.nbytes,
        "architecture": None if design is None else design.architecture,
        "support": word,
        "reason": reason,
        "context": None if design is None else design.context,
        "weights": need.weights,
        "memory": memory_at(need),
        "keep": float(keep),
        "drafts": [_draft_facts(draft) for draft in drafts_for(need, path, keep, draft)],
    }


def _draft_facts(draft: Draft) -> dict[str, Any]:
    need = draft.need
    return {
        "id": draft.name,
        "place": draft.place,
        "tokenizer": draft.tokenizer,
        "weights": 0 if need is None else need.weights,
        "memory": dict.fromkeys(LENGTHS, 0) if need is None else memory_at(need),
        "predicted_gain": draft.gain,
    }
