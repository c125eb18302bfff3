"""LongBench's metrics on cases computed by hand, and the loader on good and bad lines."""

import json
from pathlib import Path

import pytest

from mlx_specprefill_evals import longbench as lb


@pytest.mark.parametrize(
    ("prediction", "truth", "score"),
    [
        ("The Eiffel Tower.", "eiffel tower", 1.0),
        ("a big red dog", "red dog house", 2 * 2 / (3 + 3)),  # big red dog | red dog house: 2 shared
        ("dog dog", "dog", 2 * 1 / 3),  # multisets: one dog is shared
        ("cat", "dog", 0.0),
        ("", "dog", 0.0),
    ],
)
def test_qa_f1(prediction: str, truth: str, score: float) -> None:
    assert lb.qa_f1(prediction, truth) == pytest.approx(score)


def test_rouge_l_is_f1_of_the_longest_common_subsequence() -> None:
    # the cat sat down | the dog sat: "the sat" has 2 of 4 and of 3 words
    assert lb.rouge_l("the cat sat down", "the dog sat") == pytest.approx(4 / 7)
    assert lb.rouge_l("x", "y") == 0


def test_classification_divides_by_the_classes_named() -> None:
    classes = ["Person", "Individual", "Person group", "Place"]
    assert lb.classification("Person", "Person", classes) == 1
    assert lb.classification("Person or Place", "Place", classes) == 0.5
    assert lb.classification("Person group", "Person group", classes) == 1  # "Person" is part of the right name
    assert lb.classification("Person", "Place", classes) == 0


def test_numbers_said() -> None:
    assert lb.paragraph_retrieval("Paragraph 12", "Paragraph 12") == 1
    assert lb.paragraph_retrieval("Paragraph 12 or 3", "Paragraph 12") == 0.5
    assert lb.count_score("There are 7, not 8: 7.", "7") == pytest.approx(2 / 3)
    assert lb.count_score("many", "7") == 0


def test_code_similarity_takes_the_first_line_of_code() -> None:
    assert lb.code_similarity("```python\n# note\nreturn x\nmore", "return x") == 1
    # "return x" | "return yz": 7 letters in common of 8 + 9
    assert lb.code_similarity("return x", "return yz") == pytest.approx(round(1400 / 17) / 100)
    assert lb.code_similarity("# only a comment", "x = 1") == 0


def test_loader_takes_the_good_lines_and_names_the_bad_ones(tmp_path: Path) -> None:
    rows = [
        {"input": "Who?", "context": "Anna came.", "answers": ["Bob", "Anna"], "dataset": "hotpotqa"},
        {"input": "Who?", "context": "x", "answers": [], "dataset": "hotpotqa"},
        {"input": "Who?", "context": "x", "answers": ["y"], "dataset": "unheard_of"},
        {"context": "x", "answers": ["y"], "dataset": "trec"},
    ]
    file = tmp_path / "mixed.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\nnot json\n\n")
    examples, problems = lb.load(file)
    assert [example.input for example in examples] == ["Who?"]
    assert examples[0].score("anna") == 1
    assert examples[0].item().turns[0].question.startswith("Anna came.\n\n")
    assert [problem.split("line ")[1][0] for problem in problems] == ["2", "3", "4", "5"]


def test_first_line_only_where_the_authors_take_it(tmp_path: Path) -> None:
    row = {"input": "", "context": "x", "answers": ["anna"], "dataset": "triviaqa"}
    file = tmp_path / "triviaqa.jsonl"
    file.write_text(json.dumps(row))
    assert lb.load(file)[0][0].score("\nanna\nbob said so") == 1
    file.write_text(json.dumps(row | {"dataset": "qasper"}))
    assert lb.load(file)[0][0].score("\nanna\nbob said so") < 1
