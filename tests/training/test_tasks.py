"""The synthetic documents: deterministic, of the asked length, and split from the evaluation's material."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from training import tasks

from mlx_specprefill_evals import haystack, words

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
MIXTURE = tasks.Mixture(dict.fromkeys(tasks.FACTS, 1.0), turns=(1, 6))


def count(text: str) -> int:
    return -(-len(text) // 3)


def samples(number: int, length: int = 400) -> list[tasks.Sample]:
    rng = random.Random(5)
    return [tasks.training_sample(rng, length, MIXTURE, count) for _ in range(number)]


def test_same_seed_gives_the_same_samples() -> None:
    assert samples(20) == samples(20)


def test_samples_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "import random; from training import tasks; m = tasks.Mixture(dict.fromkeys(tasks.FACTS, 1.0));"
        "print(tasks.training_sample(random.Random(1), 400, m, len))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": f"{SCRIPTS}:{SCRIPTS.parent / 'server'}", "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1


def test_every_answer_is_in_the_document() -> None:
    for sample in samples(100):
        for turn in sample.turns:
            answer = re.sub(r"(?:Id|first|second|third) (?=\d)", '{"id": ', re.sub(r"^For [^:]*: ", "", turn.answer))
            pieces = re.split(r"(?<=[.}]) (?=[A-Z{])|; ", answer)  # an answer may restate several facts
            assert not sample.document or all(p.rstrip(".") in sample.document for p in pieces), turn


@pytest.mark.parametrize(("kind", "opening"), [("shared.three_records", '{"id": '), ("needle", "The secret code for ")])
def test_a_crowd_is_of_the_kind_that_is_asked_for(kind: str, opening: str) -> None:
    mixture = tasks.Mixture({kind: 1.0}, turns=(1, 1), greeting=0.0, crowd=1.0)
    sample = tasks.training_sample(random.Random(2), 1500, mixture, count)
    assert sample.document.count(opening) > 8
    crowd = [line for line in sample.document.split("\n") if line.startswith(opening)]
    assert len("".join(crowd)) > 0.7 * len(sample.document)


def test_look_alikes_stand_beside_the_record_that_is_asked_for() -> None:
    mixture = tasks.Mixture({"shared.record": 1.0}, turns=(1, 1), greeting=0.0, crowd=1.0, look_alikes=0.5)
    namesakes = halves = 0
    for seed in range(20):
        sample = tasks.training_sample(random.Random(seed), 1500, mixture, count)
        records = [json.loads(found) for found in re.findall(r"\{.*?\}", sample.document)]
        number = re.findall(r"\d{6}", sample.turns[0].question)[0]
        asked = next(record for record in records if str(record["id"]) == number)
        others = [record for record in records if record is not asked]
        assert all(str(record["id"]) != number for record in others)
        assert all(record["email"].startswith(record["name"].lower().replace(" ", ".") + "@") for record in records)
        given = asked["name"].split()[0]
        namesakes += given in words.GIVEN_NAMES and sum(other["name"].split()[0] == given for other in others) >= 2
        halves += any(number[:3] == str(o["id"])[:3] or number[3:] == str(o["id"])[3:] for o in others)
    assert namesakes >= 5
    assert halves >= 15


def test_short_documents_count_as_far_as_long_ones() -> None:
    mixture = tasks.Mixture({"needle": 1.0}, greeting=0.0, whole=1.0)
    answers = [tasks.training_sample(random.Random(seed), 256, mixture, count).turns[0].answer for seed in range(80)]
    counts = {int(match[1]) for answer in answers if (match := re.match(r"The text says so (\d+) times", answer))}
    assert set(range(3, 9)) <= counts


def test_needle_has_the_documented_wording() -> None:
    fact = tasks.needle("Orla", "123456")
    assert fact.pieces == ("The secret code for Orla is 123456.",)
    assert fact.turn == tasks.Turn("What is the secret code for Orla?", "The secret code for Orla is 123456.")


def test_messages_alternate_and_carry_the_document_once() -> None:
    turns = (tasks.Turn("Q1?", "A1."), tasks.Turn("Q2?", "A2."))
    hello = (tasks.Turn("Hi", "Hello."),)
    sample = tasks.Sample("Be brief.", "DOC", turns, lead="Read. ", bridge=" ", before=hello)
    assert sample.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Read. DOC Q1?"},
        {"role": "assistant", "content": "A1."},
        {"role": "user", "content": "Q2?"},
        {"role": "assistant", "content": "A2."},
    ]


def test_question_may_come_first() -> None:
    sample = tasks.Sample("", "DOC", (tasks.Turn("Q?", "A."),), bridge="\n\n", question_first=True)
    assert sample.messages()[0]["content"] == "Q?\n\nDOC"


def test_training_and_evaluation_share_no_name_frame_or_module() -> None:
    rng = random.Random(0)
    training = {word for _ in range(2000) for word in words.person(rng).split()}
    held_out = {word for _ in range(2000) for word in words.person(rng, held_out=True).split()}
    assert not training & held_out
    assert not set(words.FRAMES) & set(words.HELD_OUT_FRAMES)
    assert not set(haystack.PYTHON_MODULES) & set(haystack.HELD_OUT_MODULES)


def test_invented_words_keep_to_their_side_of_the_split() -> None:
    rng = random.Random(0)
    for side in (True, False):
        assert all(words.is_held_out(words.invented_word(rng, side)) == side for _ in range(200))


@pytest.mark.parametrize("kind", sorted(haystack.FILLERS))
@pytest.mark.parametrize("held_out", [False, True])
def test_filler_leaves_no_slot_open(kind: str, held_out: bool) -> None:
    rng = random.Random(0)
    pieces = [haystack.FILLERS[kind](rng, held_out) for _ in range(100)]
    assert all(piece.strip() for piece in pieces)
    assert kind == "code" or not any("{" in piece for piece in pieces)
