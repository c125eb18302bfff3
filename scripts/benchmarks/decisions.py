"""Many questions about one text, beside one; and whether they are decided sparsely as in full.

Costs: a text of the running Python's documentation, read from an empty cache with one predicate and with many, full and
sparse. The figures are what many take over one: tokens, time, and CPU seconds of this process.

Answers: choices among four values, one of them right, about the documents of `eval --task place_turn_after`. The figure
is `agreement`, the share of those that full reading has right which sparse reading has right, too.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from typing import Any

from mlx_specprefill import (
    CacheLabel,
    Decisions,
    Engine,
    EngineConfig,
    Finished,
    GenerationRequest,
    Question,
    SpecPrefillOptions,
    SpecPrefillPolicy,
)
from mlx_specprefill_evals import corpus
from mlx_specprefill_evals.tasks import TASKS, Space, make_item
from mlx_specprefill_server.openai.decisions import Asked
from mlx_specprefill_server.prompt.builder import PromptBuilder
from mlx_specprefill_server.prompt.conversation import conversation

from .harness import BenchError, pairs
from .harness.figures import machine, rounded, show_rows

QUICK = {"lengths": [2048], "n": 12}
KINDS, CHOICES = 6, 4  # of documents; of values
TASK = "place_turn_after"
MODES = {"full": False, "sparse": True}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=int, nargs="+", default=[16_000], help="tokens of the texts of the costs")
    parser.add_argument("--questions", type=int, default=100, help="of the costs")
    parser.add_argument("-n", type=int, default=60, help="questions with known answers; 0: the costs alone")
    parser.add_argument("--length", type=int, default=4096, help="tokens of their documents")


class Bench:
    """An engine, and what it decides. Nothing is cached between two texts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._prompts = PromptBuilder(engine.pair.tokenizer, engine.window)
        self._asked = 0

    def count(self, text: str) -> int:
        return len(self._engine.pair.tokenizer.encode(text, add_special_tokens=False))

    def decide(self, text: str, asked: list[Asked], sparse: bool) -> tuple[Decisions, Finished, int]:
        """Return the answers, the end, and the tokens of text and questions."""
        given = conversation([{"role": "user", "content": text}], template_kwargs={"enable_thinking": False})
        rows = [(question.render(), question.labels) for question in asked]
        prompt, read = asyncio.run(self._prompts.behind(given, rows))
        questions = tuple(row for row in read if isinstance(row, Question))
        if len(questions) < len(asked):
            raise BenchError(next(row for row in read if isinstance(row, str)))
        self._asked += 1
        request = GenerationRequest(
            prompt.tokens,
            0,
            specprefill=SpecPrefillOptions(sparse),
            spans=prompt.spans,
            questions=questions,
            label=CacheLabel(salt=str(self._asked)),
        )
        events = list(self._engine.generate(request))
        end, found = events[-1], [event for event in events if isinstance(event, Decisions)]
        if not isinstance(end, Finished) or not found:
            raise BenchError(f"no decision: {end}")
        return found[0], end, len(prompt.tokens) + request.asked

    def cost(self, text: str, count: int, sparse: bool) -> dict[str, float]:
        asked = [Asked(type="predicate", instructions=f"The text explains number {i}.") for i in range(count)]
        wall, cpu = time.perf_counter(), time.process_time()
        _, _, tokens = self.decide(text, asked, sparse)
        return {"tokens": tokens, "s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}

    def costs(self, length: int, count: int) -> list[dict[str, Any]]:
        text, rows = "", []
        for paragraph in corpus.paragraphs():
            if len(text) > 8 * length:
                break
            text += paragraph.text + "\n\n"
        tokenizer = self._engine.pair.tokenizer
        text = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[:length])
        for mode, sparse in MODES.items():
            one, many = (self.cost(text, size, sparse) for size in (1, count))
            ratios = {f"{name}_ratio": many[name] / one[name] for name in one}
            rows.append({"length": length, "mode": mode, "one_s": one["s"], "many_s": many["s"], **ratios})
        return rows

    def is_right(self, number: int, length: int, sparse: bool) -> bool:
        """Decide a question among its value and those of other documents of the kind."""
        space = Space(length, self.count, number=number)
        item = make_item(TASKS[TASK], TASK, number, space)
        values = [item.values[0]]
        other = number
        while len(values) < CHOICES:
            other += KINDS
            value = make_item(TASKS[TASK], TASK, other, Space(512, self.count, number=other)).values[0]
            values += [] if value in values else [value]
        shown = random.Random(number).sample(values, CHOICES)
        choices = [{"value": value} for value in shown]
        asked = Asked.model_validate({"type": "choice", "instructions": item.turns[-1].question, "choices": choices})
        found, _, _ = self.decide(item.turns[0].question, [asked], sparse)
        return shown[int(found.probabilities[0].argmax())] == values[0]


def run(options: argparse.Namespace) -> dict[str, Any]:
    config = EngineConfig(policy=SpecPrefillPolicy(densify=False))
    with Engine(pairs.loaded(options), config) as engine:
        bench = Bench(engine)
        rows = [rounded(row) for length in options.lengths for row in bench.costs(length, options.questions)]
        show_rows(rows)
        right = {
            mode: [bench.is_right(number, options.length, sparse) for number in range(options.n)]
            for mode, sparse in MODES.items()
        }
    both = sum(full and sparse for full, sparse in zip(right["full"], right["sparse"], strict=True))
    counts = {f"{mode}_right": sum(found) for mode, found in right.items()}
    agreement = both / counts["full_right"] if counts["full_right"] else None
    answers = {"n": options.n, "length": options.length, **counts, "agreement": agreement}
    return {"pair": options.pair, "costs": rows, "answers": answers, "machine": machine()}
