"""The user's turn behind a rendered conversation: the tokens of many questions as that turn, and of their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mlx_specprefill import InvalidRequestError, Question, as_token_ids

from .special_tokens import Places

Asked = tuple[str, Sequence[str]]  # a question, and the answers that it may have


class Part(NamedTuple):
    """A text, and the places of control tokens in it."""

    text: str
    controls: Places

    def part(self, start: int, end: int | None = None) -> Part:
        """Return the characters [start, end)."""
        end = len(self.text) if end is None else end
        return Part(self.text[start:end], [(a - start, b - start) for a, b in self.controls if start <= a and b <= end])

    def before(self, text: str, other: Part) -> Part:
        """Return this part with a text without control tokens behind it, and another part behind that."""
        at = len(self.text) + len(text)
        return Part(self.text + text + other.text, self.controls + [(a + at, b + at) for a, b in other.controls])


class NextTurn:
    """Questions as the next turn.

    Args:
        encode: returns the tokens of a part.
        header, footer: what the template writes in front of the turn's text and behind it, up to the answer.
        room: tokens that a question and its answers may have; None: any number.

    Attributes:
        header: the header's tokens.
    """

    def __init__(
        self, encode: Callable[[Part], Sequence[int]], header: Part, footer: Part, room: int | None = None
    ) -> None:
        self._encode, self._room = encode, room
        self._header, self._footer = header, footer
        self._labels: dict[str, tuple[int, ...]] = {}
        self.header = tuple(encode(header))
        self._end = tuple(encode(footer))

    def read(self, asked: Asked) -> Question | str:
        """Return a question with its header, or why it can't be read."""
        text, labels = asked
        try:
            row = self._encode(self._header.before(text.strip(), self._footer))
            question = Question(as_token_ids(row), tuple(map(self._label, labels)))
        except InvalidRequestError as error:
            return str(error)
        if self._room is not None and question.room > self._room:
            return f"it needs {question.room} tokens, and the input leaves {self._room}"
        return question

    def begins(self, question: Question) -> bool:
        """Return whether the question's tokens begin with the header's, so that the prompt can have these."""
        return tuple(question.tokens[: len(self.header)].tolist()) == self.header

    def behind_header(self, question: Question) -> Question:
        return Question(question.tokens[len(self.header) :], question.labels)

    def _label(self, text: str) -> tuple[int, ...]:
        """Return an answer's tokens as they follow the footer."""
        if text not in self._labels:
            both, end = tuple(self._encode(self._footer.before(text, Part("", [])))), len(self._end)
            follows = both[:end] == self._end and len(both) > end
            self._labels[text] = both[end:] if follows else tuple(self._encode(Part(text, [])))
        return self._labels[text]
