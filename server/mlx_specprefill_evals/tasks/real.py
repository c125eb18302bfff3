"""Tasks on real text from the running Python. Each question has one right answer.

Answers are known word for word and judged without generating them: right is an answer of which every token is the
likeliest one. A document fills its length with paragraphs, or lines of code, in the order in which they were written,
except where distractors are the point.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from .. import bm25, corpus, paraphrases
from ..corpus import Module, Paragraph
from ..errors import NotMeasuredError
from ..facts import Turn
from ..words import GIVEN_NAMES
from .base import Item, Known, Space, Task

WORDS = range(14, 41)  # of a sentence that is asked for
DEPTHS = (0.05, 0.85)  # of what is asked for: what lies behind is kept anyway
LED_BY, COPIED = 7, 8  # words of a sentence that are given, and of its rest that are asked for
SHOWN, QUOTED = range(8, 12), range(3, 8)  # words of a quotation: in the question, and in the answer
ASKED = 'Quote the sentence of the text that contains the words "{}".'
PEOPLE = 4  # that there are facts about
CLOZE_FROM, CLOZE_LETTERS = 8, 5  # a missing word stands behind so many others and has so many letters at least
CLASSES, EXAMPLES = 3, 12  # of a many-shot task, at least; examples that a class has, at least
SHOTS = range(8, 25)  # words of an example
JOINED = 0.97  # of the room: pieces have more tokens together than each by itself
FAR, CHARACTERS = (0.3, 0.9), 3.3  # how far up a helper lies, as a share of the document; characters of a token of code
LONG_ARGUMENTS = 6  # characters, at least
_PLAIN = re.compile(r"[A-Z][A-Za-z0-9 ,;()'-]+\.")


@dataclass(frozen=True)
class _Sentence:
    """A sentence, with `index`, the number of its paragraph."""

    text: str
    index: int

    @property
    def words(self) -> list[str]:
        return self.text.removesuffix(".").split()


# --- prose -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _sentences() -> tuple[_Sentence, ...]:
    """Return the sentences that a question can ask for: plain words, and enough of them."""
    return tuple(
        _Sentence(text, index)
        for index, paragraph in enumerate(corpus.paragraphs())
        for text in corpus.sentences(paragraph)
        if _PLAIN.fullmatch(text) and len(text.split()) in WORDS
    )


def _around(rng: random.Random, index: int, budget: int, space: Space) -> str:
    """Return a document of `budget` tokens with that paragraph at a random depth."""
    every, budget = corpus.paragraphs(), int(budget * JOINED)
    before: list[str] = []
    after = [every[index].text]
    depth = rng.uniform(*DEPTHS)
    ahead, behind = int(depth * budget), budget - int(depth * budget) - space.count(every[index].text + "\n\n")
    for direction, left, found in ((-1, ahead, before), (1, behind, after)):
        at = index + direction
        while (size := space.count(every[at % len(every)].text + "\n\n")) <= left:
            found.append(every[at % len(every)].text)
            left -= size
            at += direction
    return "\n\n".join([*reversed(before), *after])


def _document_with(
    rng: random.Random, space: Space, phrase: Callable[[_Sentence], str], question: str
) -> tuple[_Sentence, str]:
    """Return a sentence, and a document around it in which a phrase of the sentence occurs only once."""
    while True:
        sentence = rng.choice(_sentences())
        document = _around(rng, sentence.index, space.without(question, sentence.text), space)
        if document.count(sentence.text) == 1 and document.count(phrase(sentence)) == 1:
            return sentence, document


def _copy(rng: random.Random, space: Space) -> Item:
    """Ask for the rest of a sentence of the text."""
    lead = '\n\nThe text above says: "'
    sentence, document = _document_with(rng, space, lambda s: " ".join(s.words[:LED_BY]), lead)
    words = sentence.words
    return _continued(
        document + lead + " ".join(words[:LED_BY]), " " + " ".join(words[LED_BY : LED_BY + COPIED]), [sentence.text]
    )


def _quote(rng: random.Random, space: Space) -> Item:
    """Ask for the sentence that contains a few words from its middle. The answer begins with earlier words."""
    while True:
        sentence, document = _document_with(rng, space, _shown, ASKED)
        begun = " ".join(sentence.words[: QUOTED.start])
        if document.count(begun) == 1:
            break
    answer = " " + " ".join(sentence.words[QUOTED.start : QUOTED.stop])
    question = ASKED.format(_shown(sentence))
    return answered(f"{document}\n\n{question}", f'The sentence is: "{begun}', answer, [sentence.text])


def _shown(sentence: _Sentence) -> str:
    return " ".join(sentence.words[SHOWN.start : SHOWN.stop])


# --- other words -----------------------------------------------------------------------------------------------------


def _paraphrase(rng: random.Random, space: Space) -> Item:
    """Ask in other words for a fact about somebody, among facts about others."""
    facts, names = rng.sample(paraphrases.FACTS, PEOPLE), rng.sample(GIVEN_NAMES, PEOPLE)
    said = [f"{name} {fact}." for name, (fact, _) in zip(names, facts, strict=True)]
    question = f"{facts[0][1]} Quote what the text says about this person."
    at = rng.randrange(len(corpus.paragraphs()))
    budget = space.without(question, *said)
    pieces = _around(rng, at, budget, space).split("\n\n")
    for one in rng.sample(said, PEOPLE):
        pieces.insert(rng.randrange(1, max(2, int(DEPTHS[1] * len(pieces)))), one)
    document = "\n\n".join(pieces)
    return answered(f"{document}\n\n{question}", f'The text says: "{names[0]}', f" {facts[0][0]}", said[:1])


def _continued(text: str, answer: str, gold: Sequence[str]) -> Item:
    """Return a text to continue."""
    return Item((Turn(text, answer),), (answer.strip(),), tuple(gold), Known("", answer, raw=True))


def answered(question: str, opening: str, answer: str, gold: Sequence[str]) -> Item:
    """Return an item of one question whose answer is known after the opening."""
    turn = Turn(question, opening + answer)
    return Item((turn,), (answer.strip(),), tuple(gold), Known(opening, answer))


# --- distractors -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _prose() -> tuple[Paragraph, ...]:
    return tuple(paragraph for paragraph in corpus.paragraphs() if paragraph.prose)


@lru_cache(maxsize=1)
def _index() -> bm25.Index:
    return bm25.Index(bm25.words(paragraph.text) for paragraph in _prose())


def _cloze(rng: random.Random, space: Space) -> Item:
    """Ask for the next word of a sentence. Its paragraph is among those most like it."""
    lead = '\n\nThe text above says: "'
    while True:
        sentence = rng.choice(_sentences())
        missing = _missing_word(sentence.words)
        if missing is not None:
            break
    own, words = corpus.paragraphs()[sentence.index].text, sentence.words
    just_before = " ".join(words[missing - 3 : missing])
    alike = (text for text in _most_like(own) if just_before not in text and text != own)
    document = _among(rng, own, alike, space.without(lead, sentence.text), space)
    return _continued(document + lead + " ".join(words[:missing]), " " + words[missing], [sentence.text])


def _missing_word(words: Sequence[str]) -> int | None:
    """Return the rarest allowed word, by the number of paragraphs with it. Only the text can reveal it."""
    allowed = [
        place
        for place, word in enumerate(words)
        if place >= CLOZE_FROM and word.isalpha() and len(word) >= CLOZE_LETTERS and words.count(word) == 1
    ]
    return min(allowed, key=lambda place: (_index().frequency(words[place].lower()), place), default=None)


def _most_like(text: str) -> Iterator[str]:
    scores = _index().scores(bm25.words(text))
    return (_prose()[int(number)].text for number in (-scores).argsort(kind="stable"))


def _among(rng: random.Random, own: str, others: Iterator[str], budget: int, space: Space) -> str:
    """Return one text in a random order of as many others as fit, not as the last."""
    left, found = int(budget * JOINED) - space.count(own + "\n\n"), []
    for text in others:
        size = space.count(text + "\n\n")
        if size <= left:
            found.append(text)
            left -= size
        if left < 40:
            break
    rng.shuffle(found)
    found.insert(rng.randrange(max(1, len(found))), own)
    return "\n\n".join(found)


# --- examples --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _by_label() -> dict[str, tuple[str, ...]]:
    """Return sentences by their topic or module, each once, for labels with enough of them."""
    sources: dict[str, str] = {}
    for paragraph in corpus.paragraphs():
        for text in corpus.sentences(paragraph):
            if len(text.split()) in SHOTS:
                sources.setdefault(text, paragraph.source.partition(".")[0])
    found: dict[str, list[str]] = {}
    for text, source in sources.items():
        found.setdefault(source, []).append(text)
    return {name: tuple(texts) for name, texts in found.items() if name.isalpha() and len(texts) >= EXAMPLES}


def _many_shot(rng: random.Random, space: Space) -> Item:
    """Ask for a sentence's topic or module, from sentences with their labels."""
    labels = rng.sample(sorted(_by_label()), len(_by_label()))
    shots, chosen, size = [], 0, 0
    for label in labels:
        own = [_shot(text, label) for text in rng.sample(_by_label()[label], len(_by_label()[label]))]
        shots.append(own)
        size += sum(space.count(shot) for shot in own)
        chosen += 1
        if chosen >= CLASSES and size > 1.3 * space.length:
            break
    asked = rng.randrange(chosen)
    query = shots[asked].pop()
    label = labels[asked]
    question = query.removesuffix(f" {label}\n\n")
    given = _filled(rng, shots, space.without(question), space)
    return _continued(
        "".join(given) + question, f" {label}", [shot for shot in given if shot.endswith(f" {label}\n\n")]
    )


def _shot(text: str, label: str) -> str:
    return f"Text: {text}\nLabel: {label}\n\n"


def _filled(rng: random.Random, shots: Sequence[list[str]], budget: int, space: Space) -> list[str]:
    """Return shuffled examples of all labels in turn, as many as fit."""
    given: list[str] = []
    left, turn, waiting = int(budget * JOINED), 0, [list(own) for own in shots]
    while any(waiting):
        own = waiting[turn % len(waiting)]
        turn += 1
        if own:
            size = space.count(own[-1])
            if size > left:
                break
            given.append(own.pop())
            left -= size
    rng.shuffle(given)
    return given


# --- code ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A call in a module, as places in its source: the helper's definition, the call's arguments, their end."""

    module: Module
    helper: str
    defined: int
    arguments: int
    end: int


@lru_cache(maxsize=1)
def _calls() -> tuple[_Call, ...]:
    """Return one-line calls of functions of the same module that are defined earlier and not mentioned in between."""
    return tuple(call for module in corpus.modules() for call in _calls_in(module))


def _calls_in(module: Module) -> Iterator[_Call]:
    source = module.source
    if not source.isascii():  # places in the tree count bytes
        return
    starts = [0, *(match.end() for match in re.finditer("\n", source))]
    tree = corpus.tree_of(module)
    defined = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        helper = defined.get(_called(node))
        if helper is None or not isinstance(node, ast.Call) or not _as_declared(node, helper):
            continue
        definition = starts[helper.lineno - 1] + helper.col_offset
        arguments = starts[node.lineno - 1] + (node.func.end_col_offset or 0) + 1
        end = starts[node.lineno - 1] + (node.end_col_offset or 0)
        between = source[definition + len("def ") + len(helper.name) : arguments - 1 - len(helper.name)]
        if definition < arguments and helper.name not in between and node.end_lineno == node.lineno:
            yield _Call(module, helper.name, definition, arguments, end)


def _called(node: ast.AST) -> str:
    """Return the name of the called function, or of the object's own method."""
    if not isinstance(node, ast.Call) or not node.args or node.keywords:
        return ""
    match node.func:
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
    return ""


def _as_declared(call: ast.Call, helper: ast.FunctionDef) -> bool:
    """Return whether the arguments carry the names of the helper's parameters, so that its definition predicts the
    call.
    """
    given = [argument.id if isinstance(argument, ast.Name) else "" for argument in call.args]
    declared = [parameter.arg for parameter in helper.args.args if parameter.arg != "self"]
    return len("".join(given)) >= LONG_ARGUMENTS and given == declared[: len(given)]


def _code(rng: random.Random, space: Space) -> Item:
    """Ask for the arguments of a call. Its function is defined far above and mentioned nowhere else."""
    least, most = (share * CHARACTERS * space.length for share in FAR)
    near = [call for call in _calls() if least <= call.arguments - call.defined <= most]
    for call in rng.sample(near, len(near)):
        source = call.module.source
        text = _lines_before(source, call.arguments, space.without(source[call.arguments : call.end]), space)
        definition = source[call.defined : source.index("\n", call.defined)]
        if text.count(definition) == 1 and len(re.findall(rf"\b{call.helper}\b", text)) == 2:
            return _continued(text, source[call.arguments : call.end], [definition])
    raise NotMeasuredError(f"no module has a helper so far above its call that {space.length} tokens just hold both")


def _lines_before(source: str, end: int, budget: int, space: Space) -> str:
    """Return the last lines of the source before a place, as many as fit, cut at the place."""
    lines = source[:end].splitlines(keepends=True)
    left, first = int(budget * JOINED), len(lines)
    while first and (size := space.count(lines[first - 1])) <= left:
        first -= 1
        left -= size
    return "".join(lines[first:])


REAL: dict[str, Task] = {
    "copy": Task(_copy, 16),
    "quote": Task(_quote, 32),
    "cloze": Task(_cloze, 8),
    "many_shot": Task(_many_shot, 8),
    "code": Task(_code, 24),
    "paraphrase": Task(_paraphrase, 32),
}
