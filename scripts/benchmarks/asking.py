"""Finds the lines of a prompt that ask: by the draft's probe, by their places, at random, and by the last line alone.

The orders, their languages, texts and forms are others than the probe was fitted on: `asking.json`, this project's
documents, and the places of `eval --task places`. An order is found if half of it is read again or is the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill import ModelPair, ScoringConfig
from mlx_specprefill.arrays import Floats
from mlx_specprefill.calibration.asking_prompts import AskingPrompt, asking_prompts
from mlx_specprefill.selection.question_lines import asked_lines, lines_of, question_span, rows_of
from mlx_specprefill.selection.text import TextReader
from mlx_specprefill_evals.tasks.around_questions import PLACES
from mlx_specprefill_server.prompt.builder import PromptBuilder
from mlx_specprefill_server.prompt.conversation import conversation

from .harness import BenchError, pairs
from .harness.figures import machine, show_rows

QUICK = {"n": 6}
ROOT = Path(__file__).resolve().parents[2]
LEAST = 3000  # characters of a document
SHORT, CHARACTERS = 300, 3.1  # tokens of a prompt as it is, and characters of one in these texts


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", type=int, default=102, help="prompts, of two for each of 51 orders")
    parser.add_argument("--tokens", type=int, default=SHORT, help="some so many of each prompt, by longer documents")


def held_out(tokens: int = SHORT) -> Iterator[AskingPrompt]:
    """Yield prompts that share no order, language but English, text or form with those of the fit."""
    data = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    for place in PLACES.values():
        said = [place.system, *(text for turn in place.turns for text in (turn.question, turn.answer))]
        data["forms"].append([text.replace("$question", "$order") for text in (said if said[-1] else said[:-1])])
    files = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "LICENSE"]
    texts = tuple(text for file in files if len(text := file.read_text(encoding="utf-8")) > LEAST)
    size, every = round(CHARACTERS * (tokens - SHORT)), "\n".join(texts).replace("$", "$$")
    for number, form in enumerate(data["forms"] if size > 0 else []):
        start = number * size % (len(every) - size)
        data["forms"][number] = _longer(form, every[start : start + size // 2], every[start + size // 2 : start + size])
    for seed in (1, 2):
        yield from asking_prompts(data, seed, texts)


def _longer(form: list[str], before: str, after: str) -> list[str]:
    """Return a form with more text around its document, or around its two halves."""
    first = next((number for number, said in enumerate(form) if "$first" in said or "$document" in said), 0)
    more = form[first].replace("$first", f"{before}\n$first").replace("$document", f"{before}\n$document\n{after}", 1)
    longer = [*form[:first], more, *form[first + 1 :]]
    return [said.replace("$second", f"$second\n{after}") for said in longer]


class Bench:
    """A draft with a probe, and what it finds in prompts."""

    def __init__(self, pair: ModelPair) -> None:
        if pair.draft is None or pair.heads is None or pair.heads.probe is None:
            raise BenchError("the draft has no probe: its calibration fitted none")
        self._draft, self._probe, self._tokenizer = pair.draft, pair.heads.probe, pair.draft_tokenizer
        self._prompts, self._reader = PromptBuilder(pair.draft_tokenizer), TextReader(pair.draft_tokenizer)

    def found(self, prompt: AskingPrompt) -> dict[str, bool]:
        """Return by which ways the order is found."""
        read = asyncio.run(self._prompts.chat(conversation([dict(said) for said in prompt.messages])))
        M, units = len(read.tokens), self._reader.read(read.tokens).units
        question = question_span(M, ScoringConfig(), read.spans[-1].content_end, units)
        lines, cache = lines_of(read.spans, M, units), make_prompt_cache(self._draft)
        self._draft(mx.array(read.tokens)[None], cache=cache)
        mx.eval([part.state for part in cache])
        wanted = self._wanted(read.tokens, prompt.order)
        ways: dict[str, Floats | None] = {
            "probe": self._probe.scores(cache, lines),
            "places": None,
            "random": np.random.default_rng(M).random(len(lines), dtype=np.float32),
        }
        taken = {way: asked_lines(scores, lines, np.array([question]), rows_of(M)) for way, scores in ways.items()}
        held = {"last line": [question]} | {
            way: [question, *lines[weights > 0].tolist()] for way, weights in taken.items()
        }
        covered = {way: {t for start, end in spans for t in range(start, end)} for way, spans in held.items()}
        return {way: 2 * len(wanted & tokens) >= len(wanted) for way, tokens in covered.items()}

    def _wanted(self, tokens: Any, order: str) -> set[int]:
        """Return the tokens of the order."""
        ends = [len(self._tokenizer.decode(tokens[: end + 1].tolist())) for end in range(len(tokens))]
        at = self._tokenizer.decode(tokens.tolist()).index(order)
        return {number for number, end in enumerate(ends) if at < end <= at + len(order)}


def run(options: argparse.Namespace) -> dict[str, Any]:
    bench, counts, totals = Bench(pairs.loaded(options)), dict[str, Counter[str]](), Counter[str]()
    for _, prompt in zip(range(options.n), held_out(options.tokens), strict=False):
        found = Counter({way: int(yes) for way, yes in bench.found(prompt).items()})
        for group in ("all", "English" if prompt.language == "en" else "languages not fitted"):
            totals[group] += 1
            counts.setdefault(group, Counter()).update(found)
    rows = [{"prompts": group, "n": totals[group], **counts[group]} for group in totals]
    show_rows(rows)
    return {"pair": options.pair, "tokens": options.tokens, "rows": rows, "machine": machine()}
