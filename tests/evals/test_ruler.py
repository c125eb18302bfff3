"""RULER's generators as this suite calls them: what they need, what they give, and what they must not do."""

import random
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from mlx_specprefill_evals.errors import NotMeasuredError
from mlx_specprefill_evals.tasks import ruler
from mlx_specprefill_evals.tasks.base import Space, make_item

KEY = "One of the special magic numbers for red-cat is: {}."


def count(text: str) -> int:
    return -(-len(text) // 4)


def generate_samples(haystack, TOKENIZER, max_seq_length, num_samples, **options):
    value = str(random.randrange(10**6))
    text = "The grass is green. " * 40 + KEY.format(value) + " What is it?"
    assert len(TOKENIZER(text).input_ids) == count(text) < max_seq_length == 2000 - 24
    print("they print")
    return [{"input": text, "outputs": [value], "gen_prefix": "The number is"}]


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(
        prepare_niah=SimpleNamespace(generate_samples=generate_samples, get_haystack=lambda kind: kind),
        niah_utils=SimpleNamespace(TEMPLATE=""),
        cwe_utils=SimpleNamespace(RNG=random.Random(0)),
    )
    monkeypatch.setattr(ruler, "_lm_eval", lambda: found)


def test_a_number_is_a_seed_and_the_needle_is_the_gold(generators: None, capsys: pytest.CaptureFixture[str]) -> None:
    one, again, other = (
        make_item(ruler.RULER["niah_single_1"], "niah_single_1", seed, Space(2000, count)) for seed in (1, 1, 2)
    )
    assert one == again != other
    assert one.gold == (KEY.format(one.values[0]),)
    assert one.turns[0].question.endswith("What is it? The number is")
    assert capsys.readouterr().out == ""  # standard output is the report's


def test_without_lm_eval_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    ruler._lm_eval.cache_clear()
    with pytest.raises(NotMeasuredError, match=r"mlx-specprefill\[eval\]"):
        make_item(ruler.RULER["vt"], "vt", 0, Space(2000, count))


def test_short_prompts_are_refused() -> None:
    with pytest.raises(NotMeasuredError, match="1024"):
        make_item(ruler.RULER["fwe"], "fwe", 0, Space(600, count))


@pytest.mark.parametrize("name", list(ruler.RULER))
def test_the_real_generators_fill_the_length(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval comes with the extra eval")
    monkeypatch.setattr(ruler, "_essay_words", lambda: ("A sentence about something. " * 5000).split())
    ruler._lm_eval.cache_clear()
    state = np.random.get_state()[1][:3].tolist()
    made = make_item(ruler.RULER[name], name, 3, Space(2000, count))
    assert state != np.random.get_state()[1][:3].tolist()
    assert capsys.readouterr().out == ""
    text = made.turns[0].question
    assert 1000 < count(text) <= 2000
    assert all(value in text for value in made.values)
    assert bool(made.gold) == (name not in ("cwe", "fwe"))
    assert re.search(r"(is|are|are:|words are:)$", text.strip())
