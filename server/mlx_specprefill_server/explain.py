"""Inspections: which chunks of a prompt are kept and why. The endpoint, the page and the command line share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlx_specprefill import ChunkInfo, Inspection, TokenIds

from .generation.reader import IncrementalDetokenizer, Vocabulary


@dataclass(frozen=True, slots=True)
class ExplainedChunk:
    """One chunk: its text, its rank among the scores (1: the best), and why it is kept or dropped."""

    info: ChunkInfo
    text: str
    rank: int
    reason: str


def explain_chunks(tokenizer: Any, tokens: TokenIds, inspection: Inspection) -> list[ExplainedChunk]:
    """Return every chunk of the prompt `tokens`, in order. `tokenizer` is an mlx_lm TokenizerWrapper."""
    chunks = inspection.chunks
    by_score = sorted(chunks, key=lambda chunk: (-chunk.score, chunk.index))
    ranks = {chunk.index: rank for rank, chunk in enumerate(by_score, 1)}
    rules = _rules(inspection)
    places = [f"{ranks[chunk.index]} of {len(chunks)}" for chunk in chunks]
    reasons = [_reason(*about) + _asks(about[0], inspection) for about in zip(chunks, places, rules, strict=True)]
    return [
        ExplainedChunk(chunk, text, ranks[chunk.index], reason)
        for chunk, text, reason in zip(chunks, _texts(tokenizer, tokens, chunks), reasons, strict=True)
    ]


def explanation(inspection: Inspection, chunks: Sequence[ExplainedChunk]) -> dict[str, Any]:
    """Return an inspection as JSON."""
    body: dict[str, Any] = {
        "mode": inspection.mode,
        "reason": inspection.reason,
        "prompt_tokens": inspection.prompt_tokens,
        "kept_tokens": inspection.kept_tokens,
        "kept_spans": [list(span) for span in inspection.kept_spans],
        "forced": [{"start": start, "end": end, "reason": why} for start, end, why in inspection.forced_ranges],
        "asking": [list(span) for span in inspection.asking],
        "chunks": [_chunk(chunk) for chunk in chunks],
    }
    if inspection.predicted is not None and inspection.predicted.steady:
        body["predicted"] = inspection.predicted.to_dict()
    return body


def _chunk(chunk: ExplainedChunk) -> dict[str, Any]:
    info = {name: value for name, value in asdict(chunk.info).items() if name != "index"}
    return info | {"text": chunk.text, "rank": chunk.rank, "reason": chunk.reason}


def _texts(tokenizer: Any, tokens: TokenIds, chunks: Sequence[ChunkInfo]) -> list[str]:
    """Return each chunk's text. A character that a chunk's border cuts belongs to the chunk that completes it."""
    text = IncrementalDetokenizer(Vocabulary(tokenizer).decode)
    texts = ["".join(map(text.push, tokens[chunk.start : chunk.end].tolist())) for chunk in chunks]
    texts[-1] += text.finish()
    return texts


def _rules(inspection: Inspection) -> list[str]:
    """Return per chunk the rules that keep some of its tokens."""
    size = inspection.chunks[0].end
    named: list[dict[str, None]] = [{} for _ in inspection.chunks]
    for start, end, why in inspection.forced_ranges:
        for index in range(start // size, -(-end // size)):
            named[index][why] = None
    return [", ".join(names) for names in named]


def _asks(chunk: ChunkInfo, inspection: Inspection) -> str:
    asks = any(start < chunk.end and chunk.start < end for start, end in inspection.asking)
    return "; asks for what is kept" if asks else ""


def _reason(chunk: ChunkInfo, place: str, rules: str) -> str:
    tokens = "1 token" if chunk.kept_tokens == 1 else f"{chunk.kept_tokens} tokens"
    if chunk.forced:
        return f"kept by rule: {rules}"
    if chunk.kept:
        return f"kept for its score, {place}"
    if chunk.kept_tokens:
        return f"dropped, score {place}, except {tokens} kept by rule: {rules}"
    return f"dropped, score {place}"
