"""A Lark grammar as one regular expression: so it can be enforced in every notation, also within a JSON string.

Rules that begin or end with themselves are repetitions. Others that contain themselves are written out to a depth that
keeps the expression small. It then matches those texts of the grammar that are nested no deeper.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

LARGEST = 1 << 15  # characters of the expression
DEPTHS = (6, 4, 3, 2, 1)  # of a rule within itself, tried in turn
COMMON: Mapping[str, str] = {  # of Lark's common.lark
    "DIGIT": "[0-9]", "HEXDIGIT": "[a-fA-F0-9]", "INT": "[0-9]+", "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)",
    "SIGNED_FLOAT": r"[+-]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)",
    "NUMBER": r"(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[A-Za-z]", "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*", "WS_INLINE": r"[ \t]+", "WS": r"[ \t\f\r\n]+",
    "CR": r"\r", "LF": r"\n", "NEWLINE": r"(?:\r?\n)+",
}  # fmt: skip

_TOKEN = re.compile(
    r"""(?P<comment>(?<![\w"/])//[^\n]*|\#[^\n]*)|(?P<space>[ \t\r\f]+)|(?P<line>\n)
    |(?P<string>"(?:\\.|[^"\\\n])+"i?|"")|(?P<regex>/(?![/*])(?:\\.|[^/\\\n])+/[a-z]*)
    |(?P<arrow>->\s*\w+)|(?P<dots>\.\.)|(?P<number>\d+)|(?P<command>%\w+)
    |(?P<name>[?!]{0,2}_?[A-Za-z]\w*(?:\.[A-Za-z_]\w*)*)|(?P<priority>\.-?\d+)|(?P<mark>[:|()\[\]?*+~,])""",
    re.VERBOSE,
)
_FLAGS = frozenset("is")
_REPEATS = ("?", "*", "+")
_SIGNS = [[sign] for sign in (*_REPEATS, "~")]  # behind what is repeated


class FlatteningError(Exception):
    """A grammar that can't be written as one regular expression; the text says why."""


class _TooLargeError(Exception):
    """The expression is too large at this depth."""


def flatten(grammar: str) -> str:
    """Return a regular expression that matches, as a whole, texts of the grammar only.

    Raises:
        FlatteningError: it is no Lark grammar, has what is not supported, or is too large.
    """
    rules = _Rules(grammar)
    for depth in DEPTHS:
        try:
            whole = _Writer(rules, depth).name("start")
        except _TooLargeError:
            continue
        if whole is not None:
            return f"{rules.gap}{whole}"
    raise FlatteningError("its rules are too large, or contain themselves without end")


class _Rules:
    """The statements of a grammar.

    Attributes:
        bodies: the tokens of each rule and terminal, by name.
        gap: the expression of what may stand between any two terminals of a rule.
    """

    def __init__(self, grammar: str) -> None:
        self.bodies: dict[str, list[str]] = {}
        self.imported: dict[str, str] = {}
        self.gap = ""
        ignored: list[str] = []
        for statement in _statements(grammar):
            match statement:
                case ["%import", path, "(", *names]:
                    for name in filter(str.isidentifier, names):
                        self._import(f"{path}.{name}", None)
                case ["%import", path, *alias]:
                    self._import(path, alias[0].removeprefix("->").strip() if alias else None)
                case ["%ignore", *what]:
                    ignored += ["|", *what]
                case [name, ":", *body]:
                    name = name.lstrip("?!")
                    self.bodies[name] = _repeating(name, body)
                case _:
                    raise FlatteningError(f"{' '.join(statement)[:60]!r} is not supported")
        if "start" not in self.bodies:
            raise FlatteningError("it has no rule `start`")
        if ignored:
            self.gap = f"{_Writer(self, 1).body(ignored[1:], within=True)}*"

    def _import(self, path: str, alias: str | None) -> None:
        name = path.removeprefix("common.")
        if name not in COMMON:
            raise FlatteningError(f"{path} can't be imported")
        self.imported[alias or name] = COMMON[name]


def _statements(grammar: str) -> list[list[str]]:
    """Return the tokens of each statement. A line that begins neither a rule nor a command goes on with the last."""
    out: list[list[str]] = []
    for line in _lines(grammar):
        if line[0].startswith("%") or line[1:2] == [":"] or not out:
            out.append(line)
        else:
            out[-1] += line
    return out


def _lines(grammar: str) -> Iterator[list[str]]:
    line: list[str] = []
    at = 0
    while at < len(grammar):
        match = _TOKEN.match(grammar, at)
        if match is None:
            raise FlatteningError(f"{grammar[at : at + 20]!r} is not understood")
        at = match.end()
        if match.lastgroup == "line" and line:
            yield line
            line = []
        elif match.lastgroup not in ("line", "comment", "space", "priority"):
            line.append(match[0])
    if line:
        yield line


def _repeating(name: str, body: list[str]) -> list[str]:
    """Return the body of a rule in which it does not begin or end a way through itself: there it is a repetition."""
    whole, before, behind, between = list[list[str]](), list[list[str]](), list[list[str]](), list[list[str]]()
    ways = [way for way in _ways(body) if way != [name]]
    for way in ways:
        begins = way[:1] == [name] and way[1:2] not in _SIGNS
        ends = way[-1:] == [name]
        where = between if begins and ends else behind if begins else before if ends else whole
        where.append(way[begins : len(way) - ends])
    if not whole or len(whole) == len(ways):
        return body
    unit = [*_any_of(before), *_group(whole)]
    return [*unit, *_any_of([*behind, *([*way, *unit] for way in between)])]


def _ways(body: Sequence[str]) -> list[list[str]]:
    """Return what stands between the bars of a body, without the names of ways."""
    out, depth = [list[str]()], 0
    for token in body:
        depth += (token in ("(", "[")) - (token in (")", "]"))
        if token == "|" and not depth:
            out.append([])
        elif not token.startswith("->"):
            out[-1].append(token)
    return out


def _group(ways: Sequence[Sequence[str]]) -> list[str]:
    tokens = [token for way in ways for token in ("|", *way)]
    return ["(", *tokens[1:], ")"]


def _any_of(ways: Sequence[Sequence[str]]) -> list[str]:
    """Return any number of these ways."""
    return [*_group(ways), "*"] if ways else []


class _Writer:
    """A writer of expressions. A rule stands within itself up to `depth` times; None is an expression of no text."""

    def __init__(self, rules: _Rules, depth: int) -> None:
        self._rules = rules
        self._depth = depth
        self._open = Counter[str]()
        self._size = 0

    def name(self, name: str, within: bool = False) -> str | None:
        """Return the expression of a rule or terminal.

        Args:
            within: of a terminal, so that nothing is ignored between its parts.
        """
        if name in self._rules.imported:
            return f"(?:{self._rules.imported[name]})"
        if name not in self._rules.bodies:
            raise FlatteningError(f"there is no rule `{name}`")
        if self._open[name] >= self._depth:
            return None
        self._open[name] += 1
        body = self.body(self._rules.bodies[name], within or name.lstrip("_").isupper())
        self._open[name] -= 1
        return body

    def body(self, tokens: Sequence[str], within: bool) -> str | None:
        """Return the expression of a whole body."""
        rest = deque(tokens)
        out = self._choices(rest, within)
        if rest:
            raise FlatteningError(f"{rest[0]!r} is not expected")
        return out

    def _choices(self, rest: deque[str], within: bool) -> str | None:
        ways = [self._sequence(rest, within)]
        while rest and rest[0] == "|":
            rest.popleft()
            ways.append(self._sequence(rest, within))
        alive = [way for way in dict.fromkeys(ways) if way is not None]
        return f"(?:{'|'.join(alive)})" if alive else None

    def _sequence(self, rest: deque[str], within: bool) -> str | None:
        parts: list[str | None] = []
        while rest and rest[0] not in ("|", ")", "]"):
            if rest[0].startswith("->"):
                rest.popleft()
            else:
                parts.append(self._repeated(self._item(rest, within), rest))
        alive = [part for part in parts if part is not None]
        return "".join(alive) if len(alive) == len(parts) else None

    def _item(self, rest: deque[str], within: bool) -> str | None:
        token = rest.popleft()
        gap = "" if within else self._rules.gap
        if token in ("(", "["):
            inner = self._choices(rest, within)
            if not rest or rest.popleft() != {"(": ")", "[": "]"}[token]:
                raise FlatteningError(f"{token!r} is not closed")
            return inner if token == "(" else f"{inner or '(?:)'}?"
        if token.startswith('"'):
            return self._counted(_literal(token, rest) + gap)
        if token.startswith("/"):
            return self._counted(_regex(token) + gap)
        if token[0].isalpha() or token[0] in "_?!":
            found = self.name(token, within)
            is_terminal = token.lstrip("_").isupper()
            return found if found is None or not is_terminal else self._counted(found + gap)
        raise FlatteningError(f"{token!r} is not expected")

    def _counted(self, text: str) -> str:
        self._size += len(text)
        if self._size > LARGEST:
            raise _TooLargeError
        return f"(?:{text})"

    def _repeated(self, item: str | None, rest: deque[str]) -> str | None:
        while rest and rest[0] in (*_REPEATS, "~"):
            sign = rest.popleft()
            if sign == "~":
                item = None if item is None else f"(?:{item}){_counts(rest)}"
            elif item is None:
                item = None if sign == "+" else ""
            else:
                item = f"(?:{item}){sign}"
        return item


def _counts(rest: deque[str]) -> str:
    """Read the bounds of `~n` or `~n..m`."""
    least = rest.popleft() if rest else ""
    if not least.isdigit():
        raise FlatteningError("`~` needs a number")
    if not (rest and rest[0] == ".."):
        return f"{{{least}}}"
    rest.popleft()
    return f"{{{least},{rest.popleft() if rest else ''}}}"


def _literal(token: str, rest: deque[str]) -> str:
    """Return the expression of a string, or of a range of characters."""
    text = _text(token)
    if rest and rest[0] == "..":
        rest.popleft()
        last = _text(rest.popleft() if rest else "")
        if len(text) != 1 or len(last) != 1:
            raise FlatteningError("a range needs two characters")
        return f"[{re.escape(text)}-{re.escape(last)}]"
    expression = re.escape(text).replace("\\\n", r"\n").replace("\\ ", " ")
    return f"(?i:{expression})" if token.endswith("i") else expression


def _text(token: str) -> str:
    try:
        return str(ast.literal_eval(token.removesuffix("i")))
    except (ValueError, SyntaxError) as error:
        raise FlatteningError(f"{token[:40]!r} is no string") from error


def _regex(token: str) -> str:
    body, _, flags = token[1:].rpartition("/")
    if not _FLAGS.issuperset(flags):
        raise FlatteningError(f"the flags {flags!r} of a regular expression are not supported")
    body = body.replace(r"\/", "/")
    return f"(?{flags}:{body})" if flags else f"(?:{body})"
