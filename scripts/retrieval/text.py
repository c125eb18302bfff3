"""Training prompts: installed packages' documentation and sources, with questions whose answers have a place.

Nothing is shipped: the text is what the running Python brings (`pydoc_data`) and what the `train` extra installs. The
standard library's own modules are not among it, so that they can serve as test documents.
"""

from __future__ import annotations

import ast
import importlib.util
import random
import re
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data import topics

PACKAGES = ("numpy", "sympy", "networkx", "mpmath", "jinja2", "torch", "transformers", "huggingface_hub")
MOST_FILES = 250  # per package, so that no one of them is most of the text
SENTENCE = re.compile(r"[A-Z][^.\n]*(?:\n[^.\n]+)*\.")
FUNCTION = re.compile(r"\n( *)def (\w+)\(([^)\n]*)\)[^\n]*:\n((?:\1 +.*\n|\n){3,10})")
WORD = re.compile(r"[A-Za-z]{5,}")


@dataclass(frozen=True)
class Question:
    """A question about a document and the place of its answer, as character ranges [start, end)."""

    kind: str
    text: str
    gold: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Document:
    text: str
    questions: tuple[Question, ...]


@cache
def passages(code: bool) -> tuple[str, ...]:
    """Return long texts, sources or prose, in a fixed order."""
    if code:
        return tuple(text for text in map(_read, _files()) if len(text) > 6000)
    prose = [text for text in map(_docstrings, map(_read, _files())) if len(text) > 2500]
    return (*(text for text in topics.topics.values() if len(text) > 2500), *prose)


def make_document(rng: random.Random, length: int, count: int) -> Document:
    """Return a document of about `length` characters with inserted facts, and up to `count` questions about it."""
    code = rng.random() < 0.35
    text = _window(rng, length, code)
    text, facts = _with_facts(rng, text)
    questions: list[Question] = []
    for _ in range(8 * count):
        if len(questions) == count:
            break
        kind = rng.choice(
            [*(["code"] * 3 if code else ["begin", "phrase", "blank", "about"]), "about", "phrase", "fact"]
        )
        if (asked := KINDS[kind](rng, text, facts)) is not None:
            questions.append(asked)
    return Document(text, tuple(questions))


def _files() -> Iterator[Path]:
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            continue
        found = [path for path in sorted(Path(spec.origin).parent.rglob("*.py")) if "test" not in str(path)]
        yield from random.Random(name).sample(found, min(MOST_FILES, len(found)))


@cache
def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _docstrings(source: str) -> str:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    kinds = ast.Module | ast.FunctionDef | ast.ClassDef
    found = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    return "\n\n".join(text for text in found if len(text) > 80)


def _window(rng: random.Random, length: int, code: bool) -> str:
    text = rng.choice(passages(code))
    while len(text) < length:
        text += "\n\n" + rng.choice(passages(code))
    start = rng.randrange(0, len(text) - length + 1)
    text = text[start : start + length]
    return text[text.find("\n") + 1 :] if "\n" in text[:200] else text


NAMES = "Ingrid Omar Petra Joao Wen Fatima Lars Chloe Dmitri Aiko Bruno Sunita Tariq Elena Kofi Noor".split()
THINGS = "locker,invoice,parcel,passport,library card,train seat,office phone,hotel room,ticket,alarm".split(",")
PLACES = "Lisbon Cairo Oslo Quito Hanoi Turin Dakar Perth Lyon Minsk Tampa Osaka".split()
# Statement, question: few words in common.
PARAPHRASES = (
    ("The bakery on the corner closes at noon on Sundays.", "Until when can bread be bought at the weekend?"),
    ("Helena's younger brother studies law in Vienna.", "What subject is the sibling learning at university?"),
    ("The bridge was repainted green after the storm.", "Which colour did the crossing get?"),
    ("Mister Novak lost his wallet in the cinema.", "Where did the man leave his money behind?"),
    ("The orchestra cancelled its concert because the violinist was ill.", "Why did the musicians not perform?"),
    ("Each pupil must bring two sharpened pencils.", "What should children take along for writing?"),
    ("The farmer sold eleven sheep at the market.", "How many animals did the countryman get rid of?"),
    ("Water leaked through the ceiling of the third classroom.", "In what place did the roof let the rain in?"),
    ("The ambassador resigned in early March.", "When did the diplomat give up the post?"),
    ("Her favourite drink is warm milk with honey.", "What beverage does she like best?"),
    ("The lighthouse keeper speaks four languages.", "How many tongues does the guard of the beacon know?"),
    ("The soldiers crossed the river before dawn.", "At what time did the troops get to the other bank?"),
    ("A red carpet leads to the throne.", "What covers the floor in front of the king's seat?"),
    ("The company dismissed half of its drivers.", "Whom did the firm fire?"),
    ("Our neighbour grows tomatoes on his balcony.", "Which vegetable does the man next door cultivate?"),
    ("The aeroplane landed in Madrid because of fog.", "Where did the flight come down, and for what reason?"),
    ("The thief climbed in by the kitchen window.", "How did the burglar enter the house?"),
    ("The novel was translated into Polish last year.", "In which language can the book now be read?"),
    ("The pharmacy is opposite the railway station.", "Where can medicine be bought?"),
    ("The twins were named after their grandmother.", "From whom did the two girls get what they are called?"),
    ("The mayor promised cheaper buses.", "What did the head of the city say about transport?"),
    ("The dog buried the bone under the apple tree.", "Where did the animal hide its food?"),
    ("The lecture was boring, so everyone fell asleep.", "How did the audience react to the talk?"),
    ("The tailor needs five days to mend the coat.", "How long will the repair of the garment take?"),
)


def _fact(rng: random.Random) -> tuple[str, str]:
    """Return a sentence and a question about it."""
    name, thing, number = rng.choice(NAMES), rng.choice(THINGS), rng.randrange(1000, 10**7)
    code, place = "".join(rng.choices(string.ascii_lowercase, k=6)), rng.choice(PLACES)
    return rng.choice(
        [
            (f"The {thing} number of {name} is {number}.", f"What is {name}'s {thing} number?"),
            (f"{name}'s {thing} has the number {number}.", f"Which number belongs to the {thing} of {name}?"),
            (f"Remember: the code for {code} is {number}.", f"Tell me the code for {code}."),
            (f"One of the secret numbers for {code}-{thing.split()[0]} is: {number}.",
             f"Which secret numbers for {code}-{thing.split()[0]} are in the text?"),
            (f"{name} moved to {place} in {1900 + number % 120}.", f"Where did {name} move, and when?"),
            (f"LET {code.upper()} = {number}", f"Find all names that stand for the value {number}."),
            rng.choice(PARAPHRASES),
            rng.choice(PARAPHRASES),
        ]
    )  # fmt: skip


Facts = tuple[tuple[str, str], ...]
Maker = Callable[[random.Random, str, Facts], Question | None]


def _with_facts(rng: random.Random, text: str) -> tuple[str, Facts]:
    lines, facts = text.split("\n"), tuple(_fact(rng) for _ in range(4))
    for statement, _ in facts:
        lines.insert(rng.randrange(len(lines) + 1), statement)
    return "\n".join(lines), facts


def _fact_question(rng: random.Random, text: str, facts: Facts) -> Question | None:
    statement, question = rng.choice(facts)
    if text.count(statement) != 1:
        return None
    return Question("fact", question, ((text.index(statement), text.index(statement) + len(statement)),))


def _sentence(rng: random.Random, text: str) -> re.Match[str] | None:
    found = [m for m in SENTENCE.finditer(text) if 9 <= len(m.group().split()) <= 45 and text.count(m.group()) == 1]
    return rng.choice(found) if found else None


def _begin(rng: random.Random, text: str, facts: Facts) -> Question | None:
    if (found := _sentence(rng, text)) is None:
        return None
    head = " ".join(found.group().split()[: rng.randrange(4, 9)])
    asked = rng.choice(
        [
            'Continue the sentence which starts like this: "{}"',
            'How does the sentence "{} ..." go on?',
            'Copy out the passage whose first words are "{}".',
            'The text above says: "{}',
            'One sentence opens with "{}". Give all of it.',
        ]
    )
    return Question("begin", asked.format(head), (found.span(),))


def _phrase(rng: random.Random, text: str, facts: Facts) -> Question | None:
    if (found := _sentence(rng, text)) is None:
        return None
    words = found.group().split()
    start = rng.randrange(1, max(2, len(words) - 5))
    phrase = " ".join(words[start : start + rng.randrange(2, 6)])
    if " ".join(text.split()).count(phrase) != 1:
        return None
    asked = rng.choice(
        [
            'Where is "{}" mentioned? Give the sentence.',
            'Repeat the statement with the phrase "{}" in it.',
            'In what context do the words "{}" appear?',
            "Explain {}.",
            'Which passage speaks of "{}"?',
        ]
    )
    return Question("phrase", asked.format(phrase), (found.span(),))


def _blank(rng: random.Random, text: str, facts: Facts) -> Question | None:
    if (found := _sentence(rng, text)) is None:
        return None
    words = found.group().split()
    words[rng.randrange(2, len(words))] = rng.choice(["...", "____", "[?]"])
    asked = rng.choice(["Fill the gap: {}", 'Which word is left out of "{}"?', 'What belongs in the gap of "{}"'])
    return Question("blank", asked.format(" ".join(words)), (found.span(),))


def _about(rng: random.Random, text: str, facts: Facts) -> Question | None:
    """Return some longer words of a sentence, in any order and case."""
    if (found := _sentence(rng, text)) is None:
        return None
    words = sorted(set(WORD.findall(found.group())))
    if len(words) < 4:
        return None
    chosen = [word if rng.random() < 0.6 else word.lower() for word in rng.sample(words, rng.choice([2, 3, 3, 4]))]
    asked = rng.choice(
        [
            "What does the text say about {}?",
            "What is the connection between {}?",
            "Find what is written on {}.",
            "How are {} related, and why?",
            "Is there anything about {} here? Answer briefly.",
        ]
    )
    return Question("about", asked.format(", ".join(chosen[:-1]) + " and " + chosen[-1]), (found.span(),))


def _code(rng: random.Random, text: str, facts: Facts) -> Question | None:
    found = [match for match in FUNCTION.finditer(text) if text.count(f"def {match.group(2)}(") == 1]
    if not found:
        return None
    match = rng.choice(found)
    asked = rng.choice(
        [
            "Show how {} is implemented.",
            "Which lines make up {}?",
            "Write down the body of {} as it stands in the code.",
            "What does {} return, and what are its arguments?",
            "I want to change {}. Print it.",
        ]
    )
    return Question("code", asked.format(match.group(2)), (match.span(),))


KINDS: dict[str, Maker] = {
    "begin": _begin,
    "phrase": _phrase,
    "blank": _blank,
    "about": _about,
    "code": _code,
    "fact": _fact_question,
}
