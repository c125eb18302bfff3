"""LongBench (arXiv 2308.14508) on a local copy of its jsonl files: loader, and the authors' metrics.

Metrics follow LongBench's metrics.py and eval.py: the maximum over references, first lines where those take first
lines. ROUGE-L is F1 over the longest common subsequence of whitespace words, which differs from the `rouge` package
only for summaries of several sentences. The prompts are our own short wording; scores are not leaderboard scores.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .facts import Turn
from .tasks import Item

Metric = Callable[[str, str, Sequence[str]], float]
QUESTION = "Answer the question from the text above, in as few words as possible.\nQuestion: {input}\nAnswer:"
SUMMARY = "Write a summary of the text above.\n{input}\nSummary:"
CODE = "{input}\nComplete the next line of code. Answer with the line alone."


def qa_f1(prediction: str, truth: str, classes: Sequence[str] = ()) -> float:
    """Return the F1 of the word multisets after lower-casing and removing punctuation and articles."""
    del classes
    said, wanted = _normal(prediction).split(), _normal(truth).split()
    same = (Counter(said) & Counter(wanted)).total()
    return 2 * same / (len(said) + len(wanted)) if same else 0.0


def rouge_l(prediction: str, truth: str, classes: Sequence[str] = ()) -> float:
    """Return the F1 of the longest common subsequence of words."""
    del classes
    said, wanted = prediction.split(), truth.split()
    same = _common_subsequence(said, wanted)
    return 2 * same / (len(said) + len(wanted)) if same else 0.0


def classification(prediction: str, truth: str, classes: Sequence[str]) -> float:
    """Return 1 / (classes named) if the right one is among them. Names inside the right one's name do not count."""
    named = [name for name in classes if name in prediction]
    named = [name for name in named if name == truth or name not in truth]
    return 1 / len(named) if truth in named else 0.0


def paragraph_retrieval(prediction: str, truth: str, classes: Sequence[str] = ()) -> float:
    """Return the share of the answer's numbers that are the right paragraph's."""
    del classes
    wanted = re.search(r"\d+", truth)
    return _share_of_numbers(prediction, wanted[0]) if wanted else 0.0


def count_score(prediction: str, truth: str, classes: Sequence[str] = ()) -> float:
    """Return the share of the answer's numbers that are the right count."""
    del classes
    return _share_of_numbers(prediction, truth.strip())


def code_similarity(prediction: str, truth: str, classes: Sequence[str] = ()) -> float:
    """Return the indel similarity of the first line that is neither comment nor fence."""
    del classes
    lines = prediction.lstrip("\n").split("\n")
    said = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    total = len(said) + len(truth)
    return round(100 * 2 * _common_subsequence(said, truth) / total) / 100 if total else 1.0


def _normal(text: str) -> str:
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def _share_of_numbers(prediction: str, wanted: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def _common_subsequence(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for a in one:
        diagonal = 0
        for j, b in enumerate(other, 1):
            diagonal, row[j] = row[j], diagonal + 1 if a == b else max(row[j], row[j - 1])
    return row[-1]


@dataclass(frozen=True)
class Dataset:
    """The prompt and the metric of one data set."""

    metric: Metric
    answer_tokens: int
    ask: str
    first_line: bool = False


DATASETS: dict[str, Dataset] = {
    **dict.fromkeys(("narrativeqa", "qasper"), Dataset(qa_f1, 128, QUESTION)),
    "multifieldqa_en": Dataset(qa_f1, 64, QUESTION),
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique"), Dataset(qa_f1, 32, QUESTION)),
    "triviaqa": Dataset(qa_f1, 32, QUESTION, first_line=True),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news"), Dataset(rouge_l, 512, SUMMARY)),
    "samsum": Dataset(rouge_l, 128, "Summarise the last dialogue.\n{input}\nSummary:", first_line=True),
    "trec": Dataset(classification, 64, "Give the type of the last question.\n{input}", first_line=True),
    "passage_count": Dataset(count_score, 32, "How many different paragraphs are there above? Answer with the number."),
    "passage_retrieval_en": Dataset(
        paragraph_retrieval, 32, "Which paragraph above is this a summary of?\n{input}\nAnswer like: Paragraph 1."
    ),
    **dict.fromkeys(("lcc", "repobench-p"), Dataset(code_similarity, 64, CODE)),
}


@dataclass(frozen=True)
class Example:
    """One line of a jsonl file."""

    dataset: str
    context: str
    input: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]

    @property
    def answer_tokens(self) -> int:
        return DATASETS[self.dataset].answer_tokens

    def item(self) -> Item:
        ask = DATASETS[self.dataset].ask.format(input=self.input)
        return Item((Turn(f"{self.context}\n\n{ask}", self.answers[0]),), self.answers)

    def score(self, prediction: str) -> float:
        """Return the score in [0, 1], the best over all references."""
        dataset = DATASETS[self.dataset]
        said = prediction.lstrip("\n").split("\n")[0] if dataset.first_line else prediction
        return max(dataset.metric(said, answer, self.classes) for answer in self.answers)


def load(file: Path) -> tuple[list[Example], list[str]]:
    """Return the file's examples, and a message per line that is left out.

    Raises:
        OSError: the file can't be read.
    """
    examples, problems = [], []
    for number, line in _numbered(file):
        try:
            examples.append(_example(json.loads(line), file.stem))
        except (ValueError, KeyError, TypeError) as error:
            problems.append(f"{file}: line {number} is left out: {error!r}")
    return examples, problems


def _numbered(file: Path) -> Iterator[tuple[int, str]]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _example(row: dict[str, Any], stem: str) -> Example:
    dataset = str(row.get("dataset") or stem).removesuffix("_e")
    if dataset not in DATASETS:
        raise ValueError(f"no data set {dataset!r}; there are: {', '.join(DATASETS)}")
    answers = tuple(str(answer) for answer in row["answers"])
    if not answers:
        raise ValueError("no answers")
    return Example(dataset, str(row["context"]), str(row["input"]), answers, tuple(row.get("all_classes") or ()))
