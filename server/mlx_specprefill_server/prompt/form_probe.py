"""The form that a chat template takes, learnt from its renderings of a few conversations.

Each conversation has marks as its texts, arguments and results. A form is right if the template shows all of them in
their order. The first right one of the possible values is taken, field by field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from typing import Any

from mlx_specprefill import InvalidRequestError

from ..notations import NOTATIONS
from .conversation import Message
from .forms import Form
from .probe_messages import LONG, NAME, OTHER, SHORT, TINY, Talk, answer, calls, marks, result, system, user
from .spans import length_in_common

Show = Callable[[Form, Sequence[Message], Sequence[Mapping[str, Any]]], str]

STRING = {"type": "string", "description": "zq"}
PARAMETERS = {"type": "object", "properties": {"zqkey": STRING}, "required": ["zqkey"]}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "zq", "parameters": PARAMETERS}}
    for name in (NAME, OTHER)
)
# What clients send and some templates refuse: no description, no parameters, several types, and any schema.
ODD_PROPERTIES: Mapping[str, Any] = {
    "zqtypes": {**STRING, "type": ["string", "null"]},
    "zqnull": {**STRING, "type": "null"},
    "zqany": {"anyOf": [STRING, {"type": "null"}]},
    "zqlist": {"type": "array"},
    "zqobject": {"type": "object"},
    "zqenum": {"enum": ["zq", 1]},
}
ODD: Sequence[Mapping[str, Any]] = (
    {"name": NAME, "parameters": PARAMETERS},
    {"name": NAME, "description": "zq"},
    {"name": NAME, "description": None, "parameters": {"type": "object"}},
    {"name": NAME, "description": "zq", "parameters": {"properties": ODD_PROPERTIES}},
)
ODD_TOOLS = tuple({"type": "function", "function": function} for function in ODD)
PYTHON_DICT = "{'zqkey':"  # the arguments as Python writes them, which no model was trained on

# Templates drop them unless told otherwise, so that each new user message makes all behind the last one be read again.
KEEPING_THOUGHTS: tuple[Mapping[str, Any], ...] = (
    {"preserve_thinking": True},  # Qwen 3.6, Kimi K2.6, LFM 2.5; Gemma 4 keeps those of calls
    {"clear_thinking": False},  # GLM 4.7 to 5.2
    {"truncate_history_thinking": False},  # Nemotron 3
)

FIRST_CALL = [user("zqu1"), calls("zqc1"), result("zqr1")]
CLOSED = [*FIRST_CALL, answer("zqa1"), user("zqu2")]
TWO_CALLS = [user("zqu1"), calls("zqc1", "zqc2"), result("zqr1"), result("zqr2", SHORT[1], OTHER)]
OTHER_IDS = [[user("zqu1"), calls("zqc1", ids=ids), result("zqr1", ids[0])] for ids in (LONG, TINY)]
TWO_ROUNDS = [*FIRST_CALL, calls("zqc2", ids=SHORT[1:]), result("zqr2", SHORT[1])]
BESIDE = [user("zqu1"), calls("zqc1", text="zqa1", thought="zqt1"), result("zqr1")]
BESIDE_CLOSED = [*BESIDE, answer("zqa2"), user("zqu2")]
ORPHANS = [
    [user("zqu1"), answer("zqa1"), result("zqr1", "zqid3zqid"), user("zqu2")],
    [user("zqu1"), result("zqr1", "zqid3zqid"), answer("zqa1"), user("zqu2")],
]
UNANSWERED = [user("zqu1"), calls("zqc1"), user("zqu2")]
THOUGHTS = [
    user("zqu1"), calls("zqc1", thought="zqt1"), result("zqr1"), answer("zqa1", "zqt2"), user("zqu2"),
    answer("zqa2", "zqt3"), user("zqu3"),
]  # fmt: skip
EMPTY, ONLY_THOUGHT = ([user("zqu1"), answer("", thought), user("zqu2")] for thought in ("", "zqt1"))
# People and the assistant in any order.
PLAIN_TURNS = [
    [user("zqu1"), user("zqu2"), answer("zqa1"), user("zqu3")],
    [user("zqu1"), answer("zqa1"), answer("zqa2"), user("zqu2")],
]
CALL_TURNS = [
    [*FIRST_CALL, user("zqu2")],
    [*FIRST_CALL, user("zqu2"), answer("zqa1"), user("zqu3")],
    [*CLOSED, calls("zqc2"), result("zqr2"), user("zqu3"), calls("zqc3"), result("zqr3")],
]
OPENINGS = [[answer("zqa1"), user("zqu1")], [calls("zqc1"), result("zqr1"), user("zqu1")]]


def ask(show: Show, notation: str, has_tools: bool) -> Form:
    """Return the form for requests with tools, or for those without.

    Args:
        show: the template; refusals raise InvalidRequestError.
        notation: of calls that have to be written.
    """
    probe = _Probe(show, TOOLS if has_tools else ())
    form = Form(notation=notation)
    question = [user("zqu1")]
    form = probe.first(form, [question], no_tools=(False, not has_tools))
    if has_tools:
        form = replace(form, fills_tools=not replace(probe, tools=ODD_TOOLS).shows(form, question))
    form = replace(form, shows_tools=NAME in probe.text(form, question))
    form = probe.first(form, PLAIN_TURNS, alternates=(False, True))
    form = _ask_calls(probe, form)
    form = probe.first(form, [EMPTY], empty=(True, False))
    form = probe.first(form, [ONLY_THOUGHT], only_thought=(True, False))
    form = _ask_ids(probe, form)
    form = probe.first(form, [*PLAIN_TURNS, *CALL_TURNS], alternates=(form.alternates, True), empty=(form.empty, False))
    form = probe.first(form, OPENINGS, opens=(False, True))
    form = probe.first(form, [[answer("zqa1")]], asks=(False, True))
    form = replace(form, parallel=_shows_two_calls(probe, form))
    form = _ask_text_beside(probe, form)
    takes_none = form.calls == "written" or probe.shows(replace(form, alternates=False), UNANSWERED)
    form = replace(form, unanswered=takes_none)
    form = probe.first(form, ORPHANS, orphans=(True, False))
    with_system = [[system(), user("zqu1")], [system(), *FIRST_CALL]]
    form = probe.first(form, with_system, ["zqsys"], system=("system", "user"))
    form = probe.first(form, [[system()]], ["zqsys"], asks=(form.asks, True))
    return max((replace(form, kwargs=kwargs) for kwargs in ({}, *KEEPING_THOUGHTS)), key=partial(_kept, probe))


def notation_of(template: str, vocabulary: Iterable[str]) -> str:
    """Return the notation of calls that a model was trained on, by its marks, "" for none."""
    known = set(vocabulary)
    marks = {name: one.history_mark for name, one in NOTATIONS.items() if one.history_mark}
    return next((name for name, mark in marks.items() if mark in known or mark in template), "")


@dataclass(frozen=True, slots=True)
class _Probe:
    show: Show
    tools: Sequence[Mapping[str, Any]]

    def text(self, form: Form, talk: Talk) -> str:
        """Return the rendering, empty if the template refuses the conversation."""
        try:
            return self.show(form, talk, self.tools)
        except InvalidRequestError:
            return ""

    def shows(self, form: Form, talk: Talk, more: Sequence[str] = ()) -> bool:
        """Return whether the template shows the conversation in order, and `more` somewhere."""
        text, at = self.text(form, talk), 0
        for mark in marks(talk):
            at = text.find(mark, at)
            if at < 0:
                return False
        return bool(text) and all(mark in text for mark in more)

    def first(self, form: Form, talks: Sequence[Talk], more: Sequence[str] = (), **options: Sequence[Any]) -> Form:
        """Return the form with the first values with which the template shows the conversations, else unchanged."""
        for values in product(*options.values()):
            tried = replace(form, **dict(zip(options, values, strict=True)))
            if all(self.shows(tried, talk, more) for talk in talks):
                return tried
        return form


def _ask_calls(probe: _Probe, form: Form) -> Form:
    """Find how calls and results are shown: as they are, with other arguments or contents, or as text."""
    alternates = (form.alternates, True)
    native = [replace(form, calls=calls, null=null) for calls in ("mapping", "text") for null in (False, True)]
    showing = [tried for tried in native if "zqc1" in probe.text(tried, FIRST_CALL[:2])]
    ways: Iterable[Any] = product(("tool", "user"), alternates, ("own", "naming"), showing)
    for results, turns, ids, tried in ways:
        whole: Form = replace(tried, ids=ids, results=results, alternates=turns)
        if probe.shows(whole, FIRST_CALL) and probe.shows(whole, CLOSED) and _shows_name(probe, whole):
            return whole
    written = replace(form, calls="written")
    return probe.first(written, [FIRST_CALL, CLOSED], results=("tool", "user"), alternates=alternates)


def _kept(probe: _Probe, form: Form) -> int:
    """Count the texts and thoughts of a conversation that stand where they stood when it has further turns."""
    texts = [probe.text(form, THOUGHTS[:end]) for end in (3, 5, 7)]  # up to a result, or a user's message
    return sum(one[: length_in_common(one, other)].count("zq") for one, other in pairwise(texts))


def _shows_name(probe: _Probe, form: Form) -> bool:
    """Return whether a call, not its result, shows its function's name, and its arguments not as Python writes them."""
    text, before = probe.text(form, FIRST_CALL[:2]), probe.text(form, FIRST_CALL[:1])
    return text.count(NAME) > before.count(NAME) and text.count(PYTHON_DICT) == before.count(PYTHON_DICT)


def _shows_two_calls(probe: _Probe, form: Form) -> bool:
    """Return whether two calls are shown, and no result under the name of the other's function."""
    text, before = probe.text(form, TWO_CALLS), probe.text(form, TWO_CALLS[:1])
    first, second = (text.count(name) - before.count(name) for name in (NAME, OTHER))
    return first == second and probe.shows(form, TWO_CALLS)


def _ask_ids(probe: _Probe, form: Form) -> Form:
    """Find the ids that the template takes, or that tell the function's name to the model."""
    shows_number = f"functions.{NAME}:0" in probe.text(form, FIRST_CALL)
    if form.calls == "written" or (form.ids == "own" and not shows_number):
        return probe.first(form, OTHER_IDS, ids=("own", "short"))
    counted = replace(form, ids="naming")
    is_counted = probe.text(counted, TWO_ROUNDS).count(f"functions.{NAME}:1") > 1
    return counted if is_counted else replace(form, ids="naming each")


def _ask_text_beside(probe: _Probe, form: Form) -> Form:
    thought = ["zqt1"] if "zqt1" in probe.text(form, [BESIDE[0], BESIDE[1] | {"content": ""}, BESIDE[2]]) else []
    ways = ("kept", "joined", "apart")
    form = probe.first(form, [BESIDE], thought, beside=ways)
    return probe.first(form, [BESIDE_CLOSED], beside_earlier=(form.beside, *ways))
