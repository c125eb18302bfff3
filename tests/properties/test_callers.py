"""An answer's probabilities do not depend on the words of another caller, with a common cache and without.

Callers ask about common texts, each behind, among and in front of words of its own. All is played twice, with other
words of all callers but one, whose answers must be the same. Where two prompts begin with the same text and the first
is read sparsely, the second goes on from what the first one's question kept of it. So a caller whose prompt is read
sparsely has its own words in front of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pytest

from mlx_specprefill import CacheLabel, Finished, GenerationRequest, PromptSpan, SpecPrefillOptions, TokenEvent
from mlx_specprefill.request import SpanKind
from tests.engine.prefixes.test_edited_prompt import CONFIG, IN_FULL
from tests.engine.prefixes.test_edited_sparse_prompt import running
from tests.support.tiny import random_prompt, tiny_pair

US, THEM = 0, (1, 2)  # callers
TEXTS = [random_prompt(size, 300 + size) for size in (40, 1300, 1500)]  # a system message and two documents
SHARED, *APART = "", "key", "salt"  # what each caller has of its own


@dataclass(frozen=True)
class Part:
    """A message: a common text, or so many words of the caller's own."""

    kind: SpanKind
    text: int | None
    words: int = 0


@dataclass(frozen=True)
class Turn:
    caller: int
    parts: tuple[Part, ...]
    options: SpecPrefillOptions

    def request(self, label: CacheLabel, world: int) -> GenerationRequest:
        """Return the request. Our words are the same in all worlds, and the words of a place at each turn."""
        prompt, spans = tuple[int, ...](), []
        for place, part in enumerate(self.parts):
            seed = 10 * place + 100 * self.caller + (0 if self.caller == US else 1000 * world)
            added = random_prompt(part.words, 7000 + seed) if part.text is None else TEXTS[part.text]
            start, prompt = len(prompt), (*prompt, *added)
            spans.append(PromptSpan(part.kind, start, start + 2, len(prompt) - 2, len(prompt)))
        return GenerationRequest(prompt, 4, logprobs=0, spans=tuple(spans), specprefill=self.options, label=label)


def history(seed: int) -> list[Turn]:
    """Return turns of all callers. The last one is ours."""
    rng = np.random.default_rng(seed)

    def own(most: int) -> Iterator[Part]:
        for _ in range(int(rng.integers(0, 2))):
            yield Part(cast(SpanKind, rng.choice(["user", "assistant", "tool"])), None, int(rng.integers(5, most)))

    def turn(caller: int) -> Turn:
        in_full = caller != US and rng.random() < 0.6
        documents = [Part(cast(SpanKind, rng.choice(["user", "tool"])), text) for text in (1, 2)]
        if rng.random() < 0.3:
            documents.pop(int(rng.integers(2)))
        parts = [Part("system", 0), *own(60)]
        if not in_full and caller != US:
            parts.append(Part("user", None, 20))
        for document in documents:
            parts += [document, *own(60)]
        return Turn(caller, (*parts, Part("user", None, 80)), IN_FULL if in_full else SpecPrefillOptions())

    callers = [*rng.choice([US, *THEM, *THEM], 3), US]
    return [turn(int(caller)) for caller in callers]


@pytest.mark.parametrize("own", [SHARED, *(pytest.param(name, marks=pytest.mark.extended) for name in APART)])
@pytest.mark.parametrize("seed", [4, *(pytest.param(seed, marks=pytest.mark.extended) for seed in (2, 3, 5, 6, 7, 8))])
def test_nobodys_words_are_in_anothers_answer(seed: int, own: str) -> None:
    seen = []
    for world in (0, 1):
        with running(tiny_pair(), replace(CONFIG, prefill_step=512)) as engine:
            ours = []
            for turn in history(seed):
                label = CacheLabel(f"key-{turn.caller}" * (own == "key"), f"salt-{turn.caller}" * (own == "salt"))
                events = [*engine.generate(turn.request(label, world))]
                assert isinstance(events[-1], Finished)
                if turn.caller == US:
                    ours.append([(e.token, e.logprob) for e in events if isinstance(e, TokenEvent)])
            seen.append(ours)
    for one, other in zip(*seen, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        np.testing.assert_allclose([p for _, p in one], [p for _, p in other], atol=1e-3)
