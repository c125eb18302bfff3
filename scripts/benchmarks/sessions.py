"""When a conversation's sparse cache is extended, repaired or left, by what the next question needs.

A session reads a document with one fact or twelve and asks for one of them. Each way to go on is tried from there, and
again after four turns that each bring a fact and ask for it:

    new      such a turn: nothing of the old text is needed
    held     asks for a fact that the cache holds
    dropped  asks for a fact that it does not hold
    chat     brings text and asks nothing

Only the draft runs: what the cache holds follows from the selections. Printed is how often each kind is not answered
from the cache as it is (`misses`; only `dropped` should be), how often the fact asked for is in the cache afterwards
(`found`), how often it starts over, and how many tokens are missing on average where some are. With `--text real`
facts lie in docstrings of the standard library instead of random words.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache

from mlx_specprefill import (
    EngineConfig,
    GenerationRequest,
    ModelPair,
    SpecPrefillOptions,
    SpecPrefillPolicy,
)
from mlx_specprefill.cache.positioned import leaves
from mlx_specprefill.specprefill.forced import template_mask
from mlx_specprefill.specprefill.plan import plan_prefill
from mlx_specprefill.specprefill.scorer import Scores, ToScore, question_span
from mlx_specprefill.specprefill.scorers import scorer_for
from mlx_specprefill.specprefill.selector import Selection, missing_of, select_tokens
from mlx_specprefill.specprefill.text import TextReader
from mlx_specprefill_evals.corpus import paragraphs, sentences
from mlx_specprefill_server.prompting.conversation import conversation
from mlx_specprefill_server.prompting.prompt import PromptBuilder

from .harness import pairs
from .harness.figures import show_rows
from .harness.stages import finish
from .harness.text import NAMES, WORDS, question, secret

QUICK = {"sessions": 2}
Bools = npt.NDArray[np.bool_]
CONFIG = EngineConfig(policy=SpecPrefillPolicy(threshold=0))
CHUNK = CONFIG.selection.chunk_size
LATER = "Emma Paul Nora Victor".split()


@dataclass
class Session:
    """A conversation as the draft sees it, and the tokens that the target's sparse cache holds."""

    pair: ModelPair
    rng: np.random.Generator
    real: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    codes: dict[str, str] = field(default_factory=dict)
    cache: list[Any] | None = None
    prompt: tuple[int, ...] = ()
    held: Bools = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))

    def __post_init__(self) -> None:
        self.text = TextReader(self.pair.tokenizer)

    def fork(self) -> Session:
        return copy.deepcopy(self, {id(self.pair): self.pair, id(self.text): self.text})

    def filler(self, words: int) -> str:
        if self.real:
            return self._passage(words)
        return " ".join("The " + " ".join(self.rng.choice(WORDS, 7)) + "." for _ in range(max(1, words // 8)))

    def _passage(self, words: int) -> str:
        """Sentences of the standard library's documentation in a row, of so many words at least."""
        pages = paragraphs()
        at, found = int(self.rng.integers(len(pages))), []
        while len(" ".join(found).split()) < words:
            found += sentences(pages[at % len(pages)])
            at += 1
        return " ".join(found)

    def fact(self, name: str) -> str:
        self.codes[name] = str(self.rng.integers(100_000, 1_000_000))
        return secret(name, self.codes[name])

    def document(self, facts: int, words: int) -> str:
        parts = [f"{self.filler(words // (facts + 1))} {self.fact(name)}" for name in NAMES[:facts]]
        return " ".join([*parts, self.filler(words // (facts + 1))])

    @property
    def dense(self) -> int:
        """Tokens before the first gap."""
        return self.held.size if self.held.all() else int(np.argmin(self.held))

    def ask(self, text: str) -> tuple[Scores, Bools, tuple[int, ...]]:
        """What the draft makes of the next message, the forced tokens, and the prompt."""
        self.messages = [*self.messages, {"role": "user", "content": text}]
        prompt = asyncio.run(PromptBuilder(self.pair.tokenizer).chat(conversation(self.messages)))
        self.prompt = prompt.tokens
        options = SpecPrefillOptions(enabled=True)
        request = GenerationRequest(prompt.tokens, 1, specprefill=options, spans=prompt.spans)
        plan = plan_prefill(request, CONFIG, sparse_refusal=None)
        units = self.text.read(prompt.tokens).units
        asks = question_span(len(prompt.tokens), CONFIG.scoring, prompt.spans[-1].content_end, units)
        draft = self.pair.draft
        task = ToScore.alone(
            draft,
            self.prompt,
            CONFIG.scoring,
            question=asks,
            template=template_mask(prompt.spans, asks, plan.forced),
            stop_ids=self.pair.eos_token_ids,
            cache=self._cache_before(asks[0]),
        )
        scores = finish(scorer_for(plan.rule, self.pair.heads, CONFIG.scoring).score(draft, task))
        self.cache = scores.cache
        return scores, plan.forced, self.prompt

    def _cache_before(self, asks: int) -> list[Any]:
        """The draft's cache of the conversation, if nothing of what asks is in it; it may have to be read anew."""
        fresh = list(make_prompt_cache(self.pair.draft))
        if self.cache is None:
            return fresh
        known = max(int(part.offset) for part in leaves(self.cache) if hasattr(part, "offset"))
        return self.cache if known <= asks else fresh

    def answer(self, text: str, held: Bools) -> None:
        """The answer stays in the cache whole; its end marker is read with the next prompt."""
        tokens = len(self.pair.tokenizer.encode(text, add_special_tokens=False))
        self.messages = [*self.messages, {"role": "assistant", "content": text}]
        self.held = np.concatenate([held, np.ones(tokens, dtype=np.bool_)])

    def holds(self, text: str) -> bool:
        """Whether every token that `text` begins or ends in is held."""
        decoded, at = "", []
        whole = self.pair.tokenizer.decode(list(self.prompt))
        start = whole.index(text)
        for index, token in enumerate(self.prompt):
            begin = len(decoded)
            decoded += self.pair.tokenizer.decode([token])
            if begin < start + len(text) and len(decoded) > start:
                at.append(index)
        return bool(self.held[at].all())


def selected(text: TextReader, scores: Scores, forced: Bools, prompt: tuple[int, ...], start: int) -> Selection:
    rest = text.read(prompt).since(start)
    return select_tokens(scores.importance[start:], forced[start:], rest, CONFIG.policy.keep_pct, CONFIG.selection)


def judged(scores: Scores, forced: Bools, before: Session, fork: Session, fact: str | None) -> dict[str, float]:
    """What the rule makes of a question to which the fact is the answer."""
    first = before.dense - before.dense % CHUNK
    selection = selected(fork.text, scores, forced, fork.prompt, first)
    held = before.held[first:]
    missing = missing_of(selection, held, CONFIG.selection.stands_out)
    old = int((selection.kept < held.size).sum())
    restart = missing.size > CONFIG.policy.repair_share * old
    now = fork.held.copy()
    now[first + (selection.kept[selection.kept < held.size] if restart else missing)] = True
    fork.held = now
    return {
        "misses": missing.size > 0,
        "found": np.nan if fact is None else fork.holds(fact),
        "starts_over": restart,
        "tokens": missing.size or np.nan,
    }


Found = dict[str, list[dict[str, float]]]


def try_all(session: Session, found: Found) -> None:
    """One question of each kind, from the same state."""
    held = [name for name, code in session.codes.items() if session.holds(f"code for {name} is {code}")]
    dropped = [name for name in session.codes if name not in held and not session.holds(session.codes[name])]
    asked: dict[str, tuple[str, str | None]] = {"chat": (session.filler(40), None)}
    if held:
        name = session.rng.choice(held)
        asked["held"] = question(name), name
    if dropped:
        name = session.rng.choice(dropped)
        asked["dropped"] = question(name), name
        asked["dropped, after text"] = f"{session.filler(40)} {question(name)}", name
    for kind, (text, about) in asked.items():
        fork = session.fork()
        scores, forced, _ = fork.ask(text)
        fact = None if about is None else f"code for {about} is {session.codes[about]}"
        found[kind].append(judged(scores, forced, session, fork, fact))


def hold(pair: ModelPair, seed: int, facts: int, tokens: int, real: bool, found: Found) -> None:
    session = Session(pair, np.random.default_rng(seed), real)
    per_word = len(pair.tokenizer.encode(session.filler(400))) / 400
    name = NAMES[seed % facts]
    scores, forced, prompt = session.ask(f"{session.document(facts, int(tokens / per_word))}\n\n{question(name)}")
    kept = np.zeros(len(session.prompt), dtype=np.bool_)
    kept[selected(session.text, scores, forced, prompt, 0).kept] = True
    session.answer(secret(name, session.codes[name]), kept)
    try_all(session, found)
    for name in LATER:
        text = f"{session.filler(25)} {session.fact(name)} {session.filler(25)}\n\n{question(name)}"
        before = session.fork()
        scores, forced, _ = session.ask(text)
        found["new"].append(judged(scores, forced, before, session.fork(), None))
        new = np.ones(len(session.prompt) - session.held.size, dtype=np.bool_)
        session.answer(secret(name, session.codes[name]), np.concatenate([session.held, new]))
    try_all(session, found)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=2500, help="of the document")
    parser.add_argument("--text", choices=["random", "real"], default="random", help="what lies around the facts")


def run(options: argparse.Namespace) -> dict[str, Any]:
    pair = pairs.loaded(options)
    table = {}
    for facts in (1, 12):
        found: Found = defaultdict(list)
        for seed in range(options.seed + facts, options.seed + facts + options.sessions):
            hold(pair, seed, facts, options.tokens, options.text == "real", found)
        for kind, outcomes in found.items():
            table[f"{kind}, {facts} facts"] = summary(outcomes)
    show_rows([{"question": kind, **row} for kind, row in table.items()])
    return {"benchmark": "sessions", "pair": options.pair, "tokens": options.tokens, "rows": table}


def summary(outcomes: list[dict[str, float]]) -> dict[str, float | None]:
    """Means over the outcomes that have a value; None where none has."""
    row: dict[str, float | None] = {"n": len(outcomes)}
    for name in outcomes[0]:
        values = [one[name] for one in outcomes if not np.isnan(one[name])]
        row[name] = float(np.mean(values)) if values else None
    return row
