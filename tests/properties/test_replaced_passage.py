"""Without reuse all is read anew behind a replaced passage: as by an empty cache which reads what the report names."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlx_specprefill import (
    Engine,
    Finished,
    GenerationRequest,
    ModelPair,
    PrefillReport,
    PromptSpan,
    SpecPrefillOptions,
    TokenEvent,
)
from mlx_specprefill.cache.feeding import feed
from mlx_specprefill.cache.positioned import make_positioned_cache
from mlx_specprefill.cache.prefix.nodes import common_length
from tests.properties.test_cached_equals_fresh import CONFIG, pair_of
from tests.support.precision import float32_only
from tests.support.tiny import tiny_pair

PLACE, SAID_AGAIN, END = 100, 500, 1400  # of a value, of a text that repeats it, of the text before the question
VALUE = 3  # tokens
IN_FULL = SpecPrefillOptions(False)
FAMILIES = ["llama", "gemma3_text", "qwen3_5", "gpt_oss", "deepseek_v3"]


pytestmark = pytest.mark.usefixtures("on_the_cpu")


def texts(*values: int, length: int = VALUE) -> tuple[int, ...]:
    """Return a text with a value of so many tokens in front and another behind it, and a question."""
    rng = np.random.default_rng(0)
    text, question = rng.integers(6, 90, END).tolist(), rng.integers(6, 90, 20).tolist()
    said = [np.random.default_rng(value).integers(6, 90, length).tolist() for value in values]
    front, behind = text[:PLACE], text[SAID_AGAIN:]
    return (*front, *said[0], *text[PLACE:SAID_AGAIN], *said[1], *behind, *question)


def ask(engine: Engine, prompt: tuple[int, ...], options: SpecPrefillOptions) -> tuple[TokenEvent, PrefillReport]:
    """Return the first token of the answer, and the report. A tool's result asks nothing, so nothing is recalled."""
    spans = (PromptSpan("user", 0, 2, 8, 10), PromptSpan("tool", 10, 12, len(prompt) - 2, len(prompt)))
    request = GenerationRequest(prompt, 2, spans=spans, specprefill=options, logprobs=0)
    first, *_, last = [event for event in engine.generate(request) if isinstance(event, TokenEvent | Finished)]
    assert isinstance(first, TokenEvent)
    assert isinstance(last, Finished)
    return first, last.report


def logprob(pair: ModelPair, prompt: tuple[int, ...], kept: npt.NDArray[np.int32], token: int) -> float:
    """Return a token's log-probability behind these indices alone, read in one forward."""
    tokens = np.array(prompt, dtype=np.int32)[kept]
    *_, (_, logits) = feed(pair.target, make_positioned_cache(pair.target), tokens, kept, [kept.size], logits=True)
    row = logits[0].astype(mx.float32)
    return float(row[token] - mx.logsumexp(row))


@pytest.mark.extended
@float32_only("a forward over the whole text rounds otherwise than several")
@pytest.mark.parametrize("cached", ["dense", "sparse"])
@pytest.mark.parametrize(("family", "kv_bits"), [*((family, None) for family in FAMILIES), ("llama", 8)])
def test_nothing_that_was_read_with_the_old_one_is_seen(family: str, kv_bits: int | None, cached: str) -> None:
    """The value in front, the one that a later text repeats, and both; where it is longer, all behind it moves."""
    pair = pair_of(family, "draft") if kv_bits is None else tiny_pair("llama", head_dim=64, hidden_size=64)
    for values, length in (((2, 2), VALUE), ((2, 1), VALUE), ((1, 2), VALUE + 2)):
        old, new = texts(1, 1, length=length), texts(*values)
        changed = common_length(np.array(new), np.array(old))
        policy = replace(CONFIG.policy, reuse=False)
        with Engine(pair, replace(CONFIG, policy=policy, kv_bits=kv_bits, prefill_step=512)) as engine:
            ask(engine, old, IN_FULL if cached == "dense" else SpecPrefillOptions())
            for options in (SpecPrefillOptions(return_spans=True), IN_FULL):
                answer, report = ask(engine, new, options)
                assert report.mode == ("full" if options is IN_FULL else "sparse")
                assert options is IN_FULL or report.cached_tokens <= changed  # the first has read the new text
                spans = report.kept_spans or ((0, len(new)),)
                kept = np.concatenate([np.arange(*span, dtype=np.int32) for span in spans])
                assert answer.logprob is not None
                assert abs(logprob(pair, new, kept, answer.token) - answer.logprob) < 1e-3
            assert engine.stats().fallbacks == {}
