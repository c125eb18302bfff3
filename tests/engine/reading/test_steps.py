"""A step of a prefill makes some calls for each token, whatever the text: other answers wait for it to end."""

from __future__ import annotations

import sys
from collections.abc import Generator
from fractions import Fraction
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mlx_specprefill
from mlx_specprefill import Engine, EngineConfig, Finished, GenerationRequest, PromptSpan, SpecPrefillPolicy
from mlx_specprefill.pair import with_heads
from mlx_specprefill.selection.text import TextReader
from tests.engine.test_backlog import HEADS
from tests.support.tiny import tiny_pair

PACKAGE = str(Path(mlx_specprefill.__file__).parent)
POLICY = SpecPrefillPolicy(threshold=300, keep_pct=Fraction(1, 5), densify=False)
CONFIG = EngineConfig(policy=POLICY, prefill_step=128, prefix_cache_bytes=256 << 20)
SHORT, LONG = 1000, 3900
PER_TOKEN = 10  # calls in a step, at most: 100 000 tokens take less than a chunk of the prompt
PIECES = "\n|\n\n| a| b|List| all|?|<|tag|>|:|    |```|.| please|Question|é|。|名".split("|")
LINES = {
    "short": [" a", "\n"],
    "orders": ["List", " all", " b", "\n"],
    "questions": [" a", " b", "?", "\n"],
    "labels": ["Question", ":", " a", "\n"],
    "tags": ["<", "tag", ">", "\n"],
    "open tags": ["<", "tag", " a", "\n"],
    "paragraphs": [" a", " b", "List", "\n\n"],
    "headings": [" a", "\n", "    ", " b", "\n"],
    "beyond ASCII": ["名", "é", "。", "é", "\n"],
    "one line": ["<", " a", " b"],
}
TRIED = ("short", "orders", "headings")  # before every change


class Pieces:
    """A tokenizer whose tokens are these, again and again."""

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [PIECES[token % len(PIECES)].replace(" ", "\u0120", 1) for token in ids]

    def decode(self, ids: list[int]) -> str:
        return "".join(PIECES[token % len(PIECES)] for token in ids)


class Steps:
    """Counts the calls that our code gets and makes in each step of a prefill."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._run, self._calls, self.most = engine.prefiller.run, 0, 0
        monkeypatch.setattr(engine.prefiller, "run", self._counted)

    def _counted(self, active: Any) -> Generator[Any, None, Any]:
        steps = self._run(active)
        while True:
            self._calls = 0
            sys.setprofile(self._count)
            try:
                event = next(steps)
            except StopIteration as end:
                return end.value
            finally:
                sys.setprofile(None)
                self.most = max(self.most, self._calls)
            yield event

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        self._calls += event in ("call", "c_call") and frame.f_code.co_filename.startswith(PACKAGE)


def most_calls(line: str, length: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the calls in the longest step of the prefill of a text of such lines."""
    tokenizer: Any = Pieces()
    ids = [PIECES.index(piece) for piece in LINES[line]]
    prompt = (*ids * (length // len(ids)), 2, 3, 2)
    with Engine(with_heads(tiny_pair(context=1 << 15), HEADS), CONFIG) as engine:
        engine.prefiller.scorer.text = TextReader(tokenizer)
        steps = Steps(engine, monkeypatch)
        spans = (PromptSpan("user", 0, 0, len(prompt), len(prompt)),)
        *_, last = engine.generate(GenerationRequest(prompt, 1, spans=spans))
        assert isinstance(last, Finished)
        assert last.report.mode == "sparse"
    return steps.most


@pytest.mark.parametrize(
    "line", [one if one in TRIED else pytest.param(one, marks=pytest.mark.extended) for one in LINES]
)
def test_whatever_the_lines_are(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = (most_calls(line, length, monkeypatch) for length in (SHORT, LONG))
    assert long - short < PER_TOKEN * (LONG - SHORT)
