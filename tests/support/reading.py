"""The text that a target would read of a conversation, by an inspection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from mlx_specprefill import GenerationRequest, SpecPrefillOptions
from mlx_specprefill_server.local import LocalPair
from mlx_specprefill_server.prompt.conversation import conversation


def text_read(pair: LocalPair, messages: Iterable[Mapping[str, Any]]) -> str:
    """Return the kept text where a fifth is asked for, with a mark at each gap. Less than .45 of the prompt is kept."""
    prompt = asyncio.run(pair._prompts.chat(conversation([dict(message) for message in messages])))
    options = SpecPrefillOptions(True, Fraction(1, 5))
    found = pair.engine.inspect(GenerationRequest(prompt.tokens, 1, specprefill=options, spans=prompt.spans))
    assert found.kept_tokens < 0.45 * found.prompt_tokens
    return "…".join(pair.engine.pair.tokenizer.decode(prompt.tokens[a:b].tolist()) for a, b in found.kept_spans)
