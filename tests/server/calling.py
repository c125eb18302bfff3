"""A model that is shown all of a conversation, for tests of tools: its engine, what it was asked, and its calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .fakes import FakeEngine, FakePair, byte_tokenizer
from .form_templates import FORMS


@contextmanager
def engine_that_sees_all() -> Iterator[FakeEngine]:
    fake = FakeEngine(FakePair(byte_tokenizer(FORMS["all is shown"]), 16_384))
    yield fake
    fake.close()


def prompts(engine: FakeEngine) -> list[str]:
    return [engine.pair.tokenizer.decode(list(request.prompt)) for request in engine.requests]


def called(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'
