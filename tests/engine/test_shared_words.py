"""Importance by the draft's heads is raised where lines share rare words with the question, and no other is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mlx_specprefill import Engine, EngineConfig, GenerationRequest, RuleName, SpecPrefillOptions
from mlx_specprefill.engine.reading import scoring
from mlx_specprefill.pair import with_heads
from mlx_specprefill.selection.heads import DraftHeads, Head
from mlx_specprefill.selection.text import TextReader
from mlx_specprefill.selection.words import word_factors
from tests.support.precision import assert_close
from tests.support.tiny import random_prompt, tiny_pair

HEADS = DraftHeads((Head(1, 3, 0.5), Head(0, 0, 0.25)), 2, 3, {"copy": 1.0})
BREAKS = 8  # one token of so many ends a line
M = 400


class Words:
    """A tokenizer with words behind blanks, and line breaks."""

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return ["\n" if token % BREAKS == 0 else f"\u0120w{token}" for token in ids]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.convert_ids_to_tokens(ids)).replace("\u0120", " ")


def importance(prompt: tuple[int, ...], **options: Any) -> np.ndarray:
    words: Any = Words()
    with Engine(with_heads(tiny_pair(), HEADS), EngineConfig()) as engine:
        engine.prefiller.scorer.text = TextReader(words)
        return engine.inspect(GenerationRequest(prompt, 1, specprefill=SpecPrefillOptions(True, **options))).importance


@pytest.mark.parametrize("rule", ["default", "paper"])
def test_only_the_default_rule_looks_at_words(rule: RuleName, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = random_prompt(M)
    found, factors = importance(prompt, rule=rule), np.ones(M, np.float32)

    def none(*given: Any) -> np.ndarray:
        nonlocal factors
        factors = word_factors(*given)
        return np.ones(M, np.float32)

    monkeypatch.setattr(scoring, "word_factors", none)
    without = importance(prompt, rule=rule)
    assert_close(found, without * factors, atol=1e-6)
    assert (factors.max() > 1) == (rule == "default")


def test_the_request_s_own_importance_stays_as_it_is() -> None:
    own = np.linspace(0, 1, M, dtype=np.float32)
    assert (importance(random_prompt(M), importance=own) == own).all()
