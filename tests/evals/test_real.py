"""Tasks on real text: what is asked has one answer, which lies where the gold passage says."""

from __future__ import annotations

import ast
import re
import sysconfig
from pathlib import Path

import pytest

from mlx_specprefill_evals import corpus
from mlx_specprefill_evals.errors import NothingToDoError
from mlx_specprefill_evals.paraphrases import FACTS
from mlx_specprefill_evals.tasks import REAL, Item, Space, make_item

NAMES = sorted(REAL)
EMPTY = frozenset(
    """a about after an and as at back before between both by for from full has he in into is it last never no not of on
    or out she should since the them they through to two under used was were which while who with person""".split()
)


def content_words(text: str) -> set[str]:
    """Return a text's content words by their first five letters, so that inflections count as the same word."""
    return {word[:5] for word in re.findall(r"[a-z]+", text.lower()) if word not in EMPTY}


def count(text: str) -> int:
    return -(-len(text) // 3)


def item(name: str, number: int = 0, length: int = 1500) -> Item:
    return make_item(REAL[name], name, number, Space(length, count))


@pytest.mark.nightly
def test_the_corpus_is_large_unique_and_described() -> None:
    texts = [paragraph.text for paragraph in corpus.paragraphs()]
    assert len(set(texts)) == len(texts)
    assert sum(map(len, texts)) > 500_000
    assert re.fullmatch(r"standard library of Python 3\.\d+\.\S+, [0-9a-f]{12}", corpus.described())


def test_a_python_without_sources_has_no_real_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    corpus.modules.cache_clear()
    try:
        with pytest.raises(NothingToDoError, match="has none"):
            corpus.described.__wrapped__()
    finally:
        corpus.modules.cache_clear()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.nightly
def test_the_gold_passage_holds_the_answer_and_lies_before_the_question(name: str) -> None:
    for number in range(3):
        made = item(name, number)
        document, _, question = made.turns[0].question.rpartition("\n\n")
        assert made.known.answer.strip().rstrip(")") in " ".join(made.gold)
        assert all(passage.strip() in document for passage in made.gold)
        assert made.turns[-1].answer.startswith(made.known.opening + made.known.answer)
        assert made.known.answer not in question or name == "code"


def test_copies_and_clozes_break_off_inside_their_sentence() -> None:
    for name in ("copy", "cloze"):
        made = item(name)
        begun = made.turns[0].question.rpartition('says: "')[2]
        assert (begun + made.known.answer) in made.gold[0]
        assert made.turns[0].question.count(begun) == 2


def test_labels_come_with_examples_of_every_class() -> None:
    made = item("many_shot", 2)
    labels = re.findall(r"^Label: (\w+)$", made.turns[0].question, re.M)
    assert len(set(labels)) >= 3
    assert labels.count(made.values[0]) == len(made.gold) >= 3
    assert made.turns[0].question.endswith("\nLabel:")


def test_a_helper_is_defined_far_above_its_call_and_mentioned_nowhere_else() -> None:
    for number in range(4):
        made = item("code", number, 3000)
        text, (definition,) = made.turns[0].question, made.gold
        name = re.fullmatch(r"(?:async )?def (\w+)\(.*", definition)[1]
        assert text.endswith(f"{name}(")
        assert len(re.findall(rf"\b{name}\b", text)) == 2
        assert (len(text) - text.index(definition)) > 0.25 * len(text)
        assert ast.parse(f"f({made.known.answer}") if made.known else None


def test_facts_and_questions_share_no_word_that_says_something() -> None:
    for fact, question in FACTS:
        assert not content_words(fact) & content_words(question), (fact, question)
    assert len({*FACTS}) == len(FACTS)
    assert content_words("She was walking the dogs") == {"walki", "dogs"}
