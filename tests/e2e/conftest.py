"""The real server process on the bundled pair."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import openai
import pytest

from tests.support.scripted import Flavour, save_scripted
from tests.support.serving import Server, start

DEMO = Path(__file__).parents[2] / "models" / "demo"
PAIR = (DEMO / "target", DEMO / "draft")
SCRIPTED = ("--model-alias", "scripted", "--specprefill-threshold", "8192")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    # a small step, so that "within one step" is a short time on a slow machine too
    with start(log, *PAIR, "--specprefill-threshold", "512") as running:
        yield running
    assert "Traceback" not in log.read_text()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0, timeout=120) as sdk:
        yield sdk


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Flavour], Server]]:
    """The real server on the scripted model, one process per tool-call format, started when first asked for."""
    with ExitStack() as servers:

        @cache
        def serve(flavour: Flavour) -> Server:
            folder = tmp_path_factory.mktemp(flavour)
            model = save_scripted(folder / "model", flavour)
            log = folder / "log"
            servers.callback(lambda: _no_traceback(log.read_text()))
            return servers.enter_context(start(log, model, model, *SCRIPTED))

        yield serve


def _no_traceback(log: str) -> None:
    assert "Traceback" not in log, log


SUBJECTS = "The gardener|A traveller|The old clock|My neighbour|The river|A small boat|The baker|The library".split("|")
VERBS = "watched|passed|remembered|painted|followed|waited for|described|forgot".split("|")
OBJECTS = "the morning train|a row of lamps|the empty market|the long road|a warm lantern|the stone bridge".split("|")
PLACES = "near the harbour|behind the school|in the valley|on the hill|by the window|after the rain".split("|")


def filler(words: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    sentences: list[str] = []
    while sum(len(sentence.split()) for sentence in sentences) < words:
        parts = (rng.choice(choices) for choices in (SUBJECTS, VERBS, OBJECTS, PLACES))
        sentences.append(" ".join(parts) + ".")
    return sentences


def haystack(name: str, code: str, words: int, depth: float, seed: int) -> str:
    """A question whose answer is one sentence somewhere in prose that has nothing to do with it."""
    sentences = filler(words, seed)
    sentences.insert(int(len(sentences) * depth), f"The secret code for {name} is {code}.")
    return " ".join(sentences) + f"\n\nWhat is the secret code for {name}?"
