"""SmolLM2's own map: an answer is not ruined by estimates, whatever is chosen."""

from __future__ import annotations

import asyncio
import inspect
import json
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mlx_specprefill import CacheLabel, Engine, EngineConfig, GenerationRequest, SpecPrefillOptions, keep_pct
from mlx_specprefill.config import SpecPrefillPolicy
from mlx_specprefill_server.pair_loading import load
from mlx_specprefill_server.pairs import find_pair
from mlx_specprefill_server.prompt.builder import Prompt, PromptBuilder
from mlx_specprefill_server.prompt.conversation import conversation

pytestmark = pytest.mark.extended

TURNS = 20
FORCED = 48  # tokens of full reading's own answer, over which distributions are compared


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    pair = load(find_pair("smollm2"), "auto")
    assert pair.estimates is not None
    with Engine(pair, EngineConfig(policy=SpecPrefillPolicy(densify=False))) as engine:
        yield engine


def conversation_of(seed: int) -> list[dict[str, str]]:
    """Twenty turns about the source of modules that are on every machine."""
    texts = [textwrap.wrap(inspect.getsource(module), 160) for module in (shutil, textwrap, json, inspect)]
    rng, messages = np.random.default_rng(seed), []
    for turn in range(TURNS):
        lines = texts[turn % len(texts)]
        at = int(rng.integers(0, len(lines) - 5))
        messages.append(
            {"role": "user", "content": "\n".join([*lines[at : at + 4], "", f"What follows in part {turn}?"])}
        )
        messages.append({"role": "assistant", "content": lines[at + 4][:40]})
    return messages[:-1]


def render(engine: Engine, messages: list[dict[str, str]]) -> Prompt:
    return asyncio.run(PromptBuilder(engine.pair.tokenizer).chat(conversation(messages)))


def divergence(full: np.ndarray, other: np.ndarray) -> float:
    p, q = full.astype(np.float64), other.astype(np.float64)
    return float((np.exp(p) * (p - q)).sum(axis=1).mean())


@pytest.mark.parametrize("seed", range(1))
def test_estimates_ruin_no_random_choice(engine: Engine, seed: int) -> None:
    """Estimated control tokens brought the divergence to 15. A random choice can be further off, but not by much."""
    prompt = render(engine, conversation_of(seed))
    scores = np.random.default_rng(seed).random(len(prompt.tokens), dtype=np.float32)
    arms = {
        "full": SpecPrefillOptions(False),
        "absent": SpecPrefillOptions(True, keep_pct("0.2"), importance=scores, estimate=False),
        "estimated": SpecPrefillOptions(True, keep_pct("0.2"), importance=scores, estimate=True),
    }
    answer = tuple(prompt.tokens[-FORCED:].tolist())  # any text that fits here
    found = {}
    for name, options in arms.items():
        own = CacheLabel("test", name)  # nothing of another arm is found
        request = GenerationRequest(prompt.tokens, 1, specprefill=options, spans=prompt.spans, label=own)
        found[name] = engine.replay(request, answer)
    kept = {name: replay.report.kept_tokens for name, replay in found.items()}
    assert kept["absent"] == kept["estimated"] < kept["full"]
    assert found["estimated"].report.estimated_tokens > kept["full"] / 4
    absent, estimated = (divergence(found["full"].logprobs, found[arm].logprobs) for arm in ("absent", "estimated"))
    assert estimated <= 2 * absent, (absent, estimated)
