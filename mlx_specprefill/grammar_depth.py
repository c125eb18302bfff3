"""The depth to which native code recurses into a grammar: along rules and brackets, and along references of schemas.

llguidance has no limit of its own on references: a chain of some thousand overflows the stack and ends the process.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeVar
from urllib.parse import unquote

Node = TypeVar("Node", bound=Hashable)

_MOST_WORDS = 32_768  # names, literals and schemas of a grammar; llguidance can't hold 65 526 symbols
_MOST_PATTERNS = 100  # patternProperties of a schema: the time to compare them grows with the cube of their number
_WIDTH = 16  # members of an object that need as much stack as one level
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# As llguidance's lexer reads them, so that nothing looks like text here and like a rule there. It refuses a text that
# has no end, which is one here: what follows must not be looked at once more for each of its signs.
_TOKEN = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*"? | /(?:\\.|[^/\\])+(?:/[imslux]*)? | <[^<>\s]+> | @[\w-]+)
      | (?P<comment>(?:\#|//)[^\n]*)
      | (?P<json>%(?:json|regex|llguidance))
      | (?P<name>[_a-z][_a-z0-9-]* | _?[A-Z][_A-Z0-9-]*)
      | (?P<opens>[(\[]) | (?P<closes>[)\]]) | (?P<colons>:+) | (?P<line>\n)""",
    re.VERBOSE,
)
# Integers of any length, which Python's own reader refuses.
_JSON = json.JSONDecoder(parse_int=float)


def depth_of(grammar: str) -> int:
    """Return an upper bound of the levels of recursion into a grammar: Lark, or llguidance's list of grammars in JSON.

    Rules that refer to one another in a circle count once each.

    Raises:
        ValueError: it has too many parts, or JSON that can't be read.
    """
    if not grammar.lstrip().startswith("{"):
        return _lark_depth(grammar)
    value, _ = _read_json(grammar, 0)
    parts = value.get("grammars")
    return sum(map(_part_depth, parts if isinstance(parts, list) else ()))


def _part_depth(part: Any) -> int:
    """Return the depth of one of several grammars. Any of them may refer to any other."""
    if not isinstance(part, dict):
        return 1
    lark, schema = part.get("lark_grammar"), part.get("json_schema")
    return (_lark_depth(lark) if isinstance(lark, str) else 1) + _schema_depth(schema)


def _lark_depth(text: str) -> int:
    uses: dict[str, list[str]] = {}
    weights = Counter[str]()
    for name, names, weight in _rules(text):
        uses.setdefault(name, []).extend(names)
        weights[name] += weight
    return _longest({name: [one for one in names if one in uses] for name, names in uses.items()}, weights)


def _rules(text: str) -> Iterator[tuple[str, list[str], int]]:
    """Yield name, names in the body, and levels of each rule and terminal."""
    rule, names, head = "", list[str](), 0
    level = deepest = inner = words = at = 0
    while match := _TOKEN.search(text, at):
        at, kind = match.end(), match.lastgroup
        words += kind in ("text", "json", "name")
        if words > _MOST_WORDS:
            raise ValueError(f"the grammar has more than {_MOST_WORDS} names and literals")
        match kind:
            case "name":
                head = head if level else len(names)
                names.append(match[0])
            case "opens":
                level += 1
                deepest = max(deepest, level)
            case "closes":
                level = max(level - 1, 0)
            case "json":
                value, at = _read_json(text, at)
                inner = max(inner, _schema_depth(value)) if match[0] == "%json" else inner
            case "colons" if match[0] == ":" and not level and head < len(names):
                yield rule, names[:head], 1 + deepest + inner
                rule, names, head, deepest, inner = names[head], [], 0, 0, 0
    yield rule, names, 1 + deepest + inner


def _read_json(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value that begins at or after `at`, and the place of its end."""
    start = at + len(text[at:]) - len(text[at:].lstrip())
    try:
        return _JSON.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"its JSON can't be read: {error}") from error
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error


def _schema_depth(schema: Any) -> int:
    """Return the levels of a schema: its own nesting, and the chains of its references."""
    containers = {id(container): container for container in _containers(schema)}
    patterns = sum(len(c["patternProperties"]) for c in containers.values() if _has_patterns(c))
    if patterns > _MOST_PATTERNS:
        raise ValueError(f"the schema has {patterns} patternProperties, more than {_MOST_PATTERNS}")
    uses = {key: [*map(id, _inner(value)), *_targets(value, schema)] for key, value in containers.items()}
    return _longest(uses, {key: 1 + len(value) // _WIDTH for key, value in containers.items()})


def _containers(value: Any) -> Iterator[Any]:
    level = [value] if isinstance(value, dict | list) else []
    while level:
        yield from level
        level = [inner for container in level for inner in _inner(container)]


def _inner(container: Any) -> list[Any]:
    """Return the arrays and objects in one."""
    values = container.values() if isinstance(container, dict) else container
    return [value for value in values if isinstance(value, dict | list)]


def _has_patterns(container: Any) -> bool:
    return isinstance(container, dict) and isinstance(container.get("patternProperties"), dict)


def _targets(container: Any, root: Any) -> Iterator[int]:
    """Yield the ids of what an object refers to; of the whole schema where the reference is no path."""
    for word in _REFERENCES if isinstance(container, dict) else ():
        if isinstance(reference := container.get(word), str):
            target = _resolve(reference, root)
            yield id(target if isinstance(target, dict | list) else root)


def _resolve(reference: str, root: Any) -> Any:
    if not reference.startswith("#/"):
        return root
    value = root
    for step in unquote(reference[2:]).split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            value = value[int(name)] if name.isdecimal() and int(name) < len(value) else None
        else:
            value = value.get(name) if isinstance(value, dict) else None
    return value


def _longest(uses: Mapping[Node, Iterable[Node]], weights: Mapping[Node, int]) -> int:
    """Return an upper bound of the weight of a path that visits no node twice; nodes in a circle count all."""
    below = _peel(uses, weights)
    users: dict[Node, list[Node]] = {node: [] for node in uses if node not in below}
    for user in users:
        for node in uses[user]:
            if node in users:
                users[node].append(user)
    above = _peel(users, weights)
    circles = sum(weights[node] for node in users if node not in above)
    return max(below.values(), default=0) + circles + max(above.values(), default=0)


def _peel(uses: Mapping[Node, Iterable[Node]], weights: Mapping[Node, int]) -> dict[Node, int]:
    """Return the weight of the longest path from each node that leads into no circle."""
    order, found = TopologicalSorter(uses), dict[Node, int]()
    with suppress(CycleError):  # what comes before the circles can be had all the same
        order.prepare()
    while ready := order.get_ready():
        for node in ready:
            found[node] = weights[node] + max((found[used] for used in uses[node]), default=0)
        order.done(*ready)
    return found
