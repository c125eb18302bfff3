"""The recipe of retrieval heads: the target's forward, the documents, and both commands on a tiny target."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from mlx_specprefill import load_pair
from mlx_specprefill.selection.retrieval_heads import RetrievalDraft
from tests.support.tiny import save_checkpoint

torch = pytest.importorskip("torch", reason="needs the extra `train`")

import train_retrieval_heads as script  # noqa: E402
from retrieval import student, text  # noqa: E402
from retrieval.collect import Target, lay_out  # noqa: E402
from retrieval.text import Document, Question, make_document  # noqa: E402

TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}<s>assistant\n"
PROSE = "\n".join(f"Clause number {i} says that party {i} pays before the {i % 28}th day." for i in range(90))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny llama with a tokenizer of bytes and a chat template."""
    where = save_checkpoint(tmp_path / "target", "llama", 1, vocab_size=300)
    alphabet = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(BPE({name: number for number, name in enumerate(alphabet)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=TEMPLATE)
    fast.save_pretrained(where)
    return where


@pytest.fixture(autouse=True)
def _little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """No installed packages are read."""
    monkeypatch.setattr(text, "passages", lambda code: (PROSE,))
    monkeypatch.setattr(script, "LENGTHS", (500,))


def run(*arguments: object) -> None:
    script.main([str(argument) for argument in arguments])


def target_of(checkpoint: Path) -> tuple[Target, RetrievalDraft, Any]:
    pair = load_pair(checkpoint, dtype="float32")
    weights = {name: torch.from_numpy(np.array(value)) for name, value in tree_flatten(pair.target.parameters())}
    return Target(pair.target_config, weights, torch.float32), pair.target, pair.tokenizer._tokenizer


def test_both_commands(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, file = tmp_path / "data", tmp_path / "made" / "heads.safetensors"
    collect = ("collect", "--target", checkpoint, "--data", data, "--layers", 1, 2, "--teachers", "1.0", "2.3")
    run(*collect, "--prompts", 2)
    first = {path.name: path.stat().st_mtime_ns for path in data.iterdir()}
    run(*collect, "--prompts", 4)
    assert sorted(path.name for path in data.iterdir()) == ["0000.pt", "0001.pt", "0002.pt", "0003.pt"]
    assert {name: (data / name).stat().st_mtime_ns for name in first} == first  # what is there is not made again
    taught = [student.load(path, 2).mass is not None for path in sorted(data.iterdir())]
    assert taught == [True, False, False, True]

    train = ("train", "--target", checkpoint, "--data", data, "--heads", 3, "--file", file)
    run(*train, "--layers", 2, "--steps", 100, "--about", '{"licence": "none"}')
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split(":")[0] for line in told] == ["step 50", "step 100"]
    assert float(told[1].split()[-1]) < float(told[0].split()[-1])
    draft = load_pair(checkpoint, "self", draft_heads=file, dtype="float32").draft
    assert isinstance(draft, RetrievalDraft)
    assert (draft.count, draft.retrieval.heads, draft.retrieval.width) == (2, 3, script.WIDTH)
    assert all(bool(mx.isfinite(array).all().item()) for _, array in tree_flatten(draft.retrieval.parameters()))

    with pytest.raises(SystemExit, match=r"--layers 3: .* has the hidden states after \[1, 2\] layers"):
        run(*train, "--layers", 3)


def test_questions_in_one_pass_are_as_if_asked_alone(checkpoint: Path) -> None:
    target, _, tokenizer = target_of(checkpoint)
    asked = (Question("fact", "Who pays?", ((0, 6),)), Question("fact", "On which day is it?", ((7, 13), (20, 22))))
    both = lay_out(Document(PROSE[:200], asked), tokenizer)
    states, seen = target(both, (2,), ((1, 0),))
    for number, question in enumerate(asked):
        alone = lay_out(Document(PROSE[:200], (question,)), tokenizer)
        expected, attention = target(alone, (2,), ((1, 0),))
        mine, document = both.groups == number + 1, both.groups == 0
        assert torch.allclose(states[2][mine], expected[2][alone.groups == 1], atol=1e-4)
        ours = seen[0][mine][:, document]
        assert torch.allclose(ours, attention[0][alone.groups == 1][:, alone.groups == 0], atol=1e-5)
        found = tokenizer.decode(both.tokens[: both.gold.shape[1]][both.gold[number]])
        assert found == "".join(PROSE[start:end] for start, end in question.gold)


def test_answers_stand_where_they_are_said_to() -> None:
    documents = [make_document(random.Random(seed), 3000, 8) for seed in range(20)]
    assert documents == [make_document(random.Random(seed), 3000, 8) for seed in range(20)]
    for document in documents:
        assert len(document.questions) > 3
        for question in document.questions:
            found = [document.text[start:end] for start, end in question.gold]
            assert all(document.text.count(passage) == 1 for passage in found)
