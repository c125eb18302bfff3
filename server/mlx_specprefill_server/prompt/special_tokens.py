"""Control tokens in the text of people, tools and files are text, never structure.

A template joins structure and content into one text that no longer separates them. So before rendering, this
module writes the names of control tokens in content in private-use characters, one for one, which mean nothing to
templates. Every name that is left in the rendered text is then the template's own. The module turns the private-use
characters back, and the tokenizer reads the text as it is; where content has a name, it reads the two sides of a cut
through that name. All tokens of a text without such names stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any

from ..http.errors import refusal
from ..notations import THINK_TAGS
from ..notations.formats import reasoning_tags
from .conversation import Conversation, Message
from .spans import TURN_ENDS

NOTHING: frozenset[str] = frozenset()

Encoded = tuple[tuple[int, ...], list[tuple[int, int]] | None]

FIRST, LAST = 0xF0000, 0xFFFFD  # the bounds of a private-use plane
PRIVATE = re.compile(f"[{chr(FIRST)}-{chr(LAST)}]")
ESCAPED = re.compile(r"\\u(db[89ab][0-9a-f])\\u(d[c-f][0-9a-f]{2})", re.IGNORECASE)  # of that plane, in ASCII JSON
# Words of JSON schemas and of calls that templates read by name.
WORDS = frozenset(
    "$defs $ref additionalProperties allOf anyOf arguments array boolean const default description enum format "
    "function id integer items maxItems maximum minItems minimum name null number object oneOf parameters pattern "
    "properties required return string strict title type".split()
)

BY_CONVENTION = re.compile(r"<\|.*>|<.*\|>|<｜.*｜>", re.DOTALL)
BRACKETED = re.compile(r"[<\[◁]\S*[>\]▷]")
TAG = re.compile(r"</?[^\s<>|｜]+>")
WORD = re.compile(r"\W*(\w+)\W*")

Places = list[tuple[int, int]]


class EscapedConversation:
    """A conversation whose content has no name of a control token, and none that a template could complete.

    Attributes:
        conversation: with private-use characters in place of such names.
    """

    def __init__(self, conversation: Conversation, controls: ControlTokens) -> None:
        self._given = conversation
        self._controls = controls
        self.conversation = replace(
            conversation,
            messages=tuple(self._message(message) for message in conversation.messages),
            tools=tuple(self._value(tool) for tool in conversation.tools),
            template_kwargs={name: self._value(v, False) for name, v in conversation.template_kwargs.items()},
        )

    @cached_property
    def _substitutes(self) -> Mapping[int, int]:
        """Return for each character of names one that the conversation does not have."""
        alphabet = sorted(set("".join(self._controls.ids)))
        given = (self._given.messages, self._given.tools, self._given.template_kwargs)
        used = sorted({ord(char) for text in _texts(given) for char in _private_in(text)})
        first = FIRST
        for taken in used:
            if taken >= first + len(alphabet):
                break
            first = taken + 1
        if first + len(alphabet) > LAST:
            field = self._given.field
            raise refusal(field, "too many different private-use characters")
        return {ord(char): first + i for i, char in enumerate(alphabet)}

    def from_json(self, rendered: str) -> str:
        """Return a rendering with our private-use characters, where a template wrote them as JSON escapes."""
        if "_substitutes" not in self.__dict__:
            return rendered
        ours = set(self._substitutes.values())

        def read(match: re.Match[str]) -> str:
            char = _unescape_pair(match)
            return char if ord(char) in ours else match[0]

        return ESCAPED.sub(read, rendered)

    def unescape(self, rendered: str) -> str:
        """Return the same text, character for character, with the names of control tokens restored."""
        if "_substitutes" not in self.__dict__:
            return rendered
        meant = {substitute: char for char, substitute in self._substitutes.items()}
        run = f"[{chr(min(meant))}-{chr(max(meant))}]+"
        return re.sub(run, lambda match: match[0].translate(meant), rendered)

    def _message(self, message: Message) -> Message:
        kept = {"assistant": self._controls.model, "system": self._controls.operator}.get(message["role"], NOTHING)
        escaped = {"content": self._text(message["content"], kept), "role": message["role"]}
        return {name: escaped[name] if name in escaped else self._value(value) for name, value in message.items()}

    def _value(self, value: Any, words: bool = True) -> Any:
        """Escape a tool, a call, or an argument of the template, with everything in it, names included."""
        match value:
            case str():
                return value if value in WORDS else self._text(value, words=words)
            case dict():
                return {self._value(name, words): self._value(inner, words) for name, inner in value.items()}
            case list() | tuple():
                return [self._value(inner, words) for inner in value]
        return value

    def _text(self, text: str, kept: frozenset[str] = NOTHING, words: bool = False) -> str:
        parts, at = list[str](), 0
        for start, end in self._controls.in_content(text, kept, words):
            parts += [text[at:start], text[start:end].translate(self._substitutes)]
            at = end
        return "".join([*parts, text[at:]])


def _unescape_pair(pair: re.Match[str]) -> str:
    return bytes.fromhex(pair[1] + pair[2]).decode("utf-16-be")


def _private_in(text: str) -> Iterator[str]:
    yield from PRIVATE.findall(text)
    yield from map(_unescape_pair, ESCAPED.finditer(text))


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for name, inner in value.items():
                yield name
                yield from _texts(inner)
        case list() | tuple():
            for inner in value:
                yield from _texts(inner)


class Encoder:
    """A tokenizer of rendered conversations; `tokenizer` is an mlx_lm TokenizerWrapper."""

    def __init__(self, tokenizer: Any, controls: ControlTokens) -> None:
        self._tokenizer = tokenizer._tokenizer  # the wrapper forwards attributes, but not the call itself
        self._controls = controls
        self._fast = bool(getattr(tokenizer, "is_fast", False))
        self._ids = frozenset(controls.ids.values()) - {getattr(tokenizer, "unk_token_id", None)}

    def encode_raw(self, text: str) -> Encoded:
        """Tokenize with every name of a control token as that token."""
        return self._encode_parts([text])

    def encode(self, text: str, structure: Places, field: str) -> Encoded:
        """Return the ids that mlx-lm makes from a rendered template, and their places, which only fast tokenizers know.

        Args:
            structure: where control tokens are, ascending. What has a name elsewhere is text: it is tokenized in two
                parts. So is what the tokenizer takes for a name in another spelling.
            field: names the prompt in errors.

        Raises:
            InvalidRequestError: this tokenizer can't tell the two apart.
        """
        cuts = set(self._controls.cuts(text, structure))
        named = sum(self._controls.ids[text[start:end]] in self._ids for start, end in structure)
        while True:
            ends = pairwise([0, *sorted(cuts), len(text)])
            ids, places = self._encode_parts([text[start:end] for start, end in ends])
            if sum(token in self._ids for token in ids) == named:
                return ids, places
            starts, found = {start for start, _ in structure}, zip(ids, places or (), strict=False)
            names = [span for token, span in found if token in self._ids and starts.isdisjoint(range(*span))]
            further = {b - len(text[a:b].lstrip()) + 1 for a, b in names} - cuts  # blanks may belong to a name
            if not further:  # a single character is a name, or a slow tokenizer has no places
                raise refusal(field, "this tokenizer can't read the names of control tokens as text; take them out")
            cuts |= further

    def _encode_parts(self, parts: list[str]) -> Encoded:
        if not self._fast:
            return tuple(chain.from_iterable(self._tokenizer.encode(p, add_special_tokens=False) for p in parts)), None
        encoded = self._tokenizer(parts, add_special_tokens=False, return_offsets_mapping=True)
        places: list[tuple[int, int]] = encoded["offset_mapping"][0]  # moved in the other parts: most texts have one
        for at, found in zip(accumulate(map(len, parts[:-1])), encoded["offset_mapping"][1:], strict=True):
            places += [(at + start, at + end) for start, end in found]
        return tuple(chain.from_iterable(encoded["input_ids"])), places


class ControlTokens:
    """The control tokens of one tokenizer, an mlx_lm TokenizerWrapper.

    Attributes:
        ids: by name.
        operator: tags that are no special tokens, such as `<tool_call>`. System prompts may show them to the model.
        model: those, and the tags of its reasoning: what an assistant's message may have as the model wrote it.
    """

    def __init__(self, tokenizer: Any) -> None:
        known = getattr(tokenizer, "added_tokens_decoder", {})
        template = str(getattr(tokenizer, "chat_template", "") or "")
        structure = {*chain.from_iterable(THINK_TAGS.values()), tokenizer.tool_call_start, tokenizer.tool_call_end}
        ends = set(tokenizer.eos_token_ids)

        def is_control(token: int, name: str, special: bool) -> bool:
            named = name in structure or (BRACKETED.fullmatch(name) is not None and name in template)
            return special or named or token in ends or BY_CONVENTION.fullmatch(name) is not None

        # A token that only matches a whole word can't be told from text by its name.
        added = {t: token for t, token in known.items() if token.content and not token.single_word}
        self.ids = {token.content: t for t, token in added.items() if is_control(t, token.content, bool(token.special))}
        plain = {added[t].content for t in self.ids.values() if not added[t].special and t not in ends}
        self.operator = frozenset(name for name in plain if TAG.fullmatch(name) and name not in TURN_ENDS)
        thinks = "\n".join(reasoning_tags(tokenizer) or ())
        self.model = self.operator | {name for name in self.ids if name in thinks and name not in TURN_ENDS}
        self._pattern = re.compile(_longest_of(self.ids) if self.ids else r"(?!)", re.DOTALL)
        self._joined = "\0".join(self.ids)
        self._longest = max(map(len, self.ids), default=0)
        self._beginnings = {name[:end] for name in self.ids for end in range(1, len(name))}
        self._ends = {name[start:] for name in self.ids for start in range(1, len(name))}
        self._words = {match[1] for name in self.ids if (match := WORD.fullmatch(name))}

    def places(self, text: str) -> Places:
        """Return the places of names, as tokenizers match them: the first one, and the longest of several."""
        return [match.span() for match in self._pattern.finditer(text)]

    def cuts(self, text: str, structure: Places) -> Iterator[int]:
        """Yield places at which a text has to be cut so that its parts have only the names of a structure."""
        meant, at = set(structure), 0
        while match := self._pattern.search(text, at):
            at = match.end()
            if match.span() not in meant:
                yield (at := match.start() + 1)

    def in_content(self, text: str, kept: frozenset[str] = NOTHING, words: bool = False) -> Places:
        """Return the places that could be taken for a control token, in this text alone or between any others.

        Names, and the parts of names at its ends, which a template could complete.

        Args:
            kept: these names stay as they are.
            words: also a text that is no more than the word in a name, as in the tags that templates make of keys.
        """
        runs, out = list(self._runs(text, kept)), []
        for start, end in runs:
            inside = [place for place in self.places(text[start:end]) if place[0] < place[1]]
            out += [(start + a, start + b) for a, b in self._with_ends(text[start:end], inside, words)]
        return out

    def _runs(self, text: str, kept: frozenset[str]) -> Iterator[tuple[int, int]]:
        """Return the parts between the kept names."""
        at = 0
        for match in self._pattern.finditer(text) if kept else ():
            if match[0] in kept:
                yield at, match.start()
                at = match.end()
        yield at, len(text)

    def _with_ends(self, run: str, inside: Places, words: bool) -> Places:
        if len(run) < self._longest and self._is_part(run, words):
            return [(0, len(run))]
        first, last = (inside[0][0], inside[-1][1]) if inside else (len(run), 0)
        sizes = range(min(self._longest - 1, len(run)), 0, -1)
        lead = next((size for size in sizes if size <= first and run[:size] in self._ends), 0)
        tail = next(
            (size for size in sizes if len(run) - size >= max(last, lead) and run[-size:] in self._beginnings), 0
        )
        return [*([(0, lead)] if lead else []), *inside, *([(len(run) - tail, len(run))] if tail else [])]

    def _is_part(self, run: str, words: bool) -> bool:
        return (words and run in self._words) or (
            not run.isalnum() and bool(run.strip("_ \t\r\n")) and run in self._joined
        )


def _longest_of(names: Iterable[str]) -> str:
    """Return a pattern that finds the longest name in time linear in the text, whatever the names have in common."""
    tree: dict[str, Any] = {}
    for name in names:
        node = tree
        for char in name:
            node = node.setdefault(char, {})
        node[""] = {}
    return _branches(tree)


def _branches(node: dict[str, Any]) -> str:
    ways = [re.escape(char) + _branches(following) for char, following in sorted(node.items()) if char]
    if not ways:
        return ""
    return f"(?:{'|'.join(ways)})" + ("?" if "" in node else "")
