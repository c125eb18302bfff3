"""Sessions of coding agents in the shape of recorded ones: what is sent, turn by turn, and what has to be known."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_specprefill_evals import words
from mlx_specprefill_evals.facts import six_digits

from . import agent_text
from .agent_text import Count, Kind
from .text import question, secret

__all__ = ["KINDS", "TEMPLATE", "Message", "Session", "Shape", "Step", "make_session"]

Message = dict[str, Any]

# As models that call tools have it: system text and tools in one message, calls in tags, results from the user's side.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if loop.first and tools and m['role'] == 'system' %}"
    "{{ '<|im_start|>system\n' + m['content'] + '\n\n# Tools\n\n<tools>' }}"
    "{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}"
    "{% elif m['role'] == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m['content'] + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for call in m.get('tool_calls') or [] %}"
    "{{ '<tool_call>\n' }}"
    "{{ {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}"
    "{{ '\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Turns of a session by what comes back, in shares of what it grows to; "ask": the user asks for a fact.
WORK: tuple[tuple[Kind | str, float], ...] = (
    ("read", 0.16),
    ("search", 0.05),
    ("read", 0.09),
    ("edit", 0.01),
    ("test", 0.11),
    ("ask", 0.0),
    ("read", 0.13),
    ("edit", 0.01),
    ("test", 0.06),
    ("search", 0.03),
    ("ask", 0.0),
    ("read", 0.06),
    ("test", 0.02),
    ("ask", 0.0),
)

# A few turns, whose results are as long in a small context as they are in a large one.
SHORT: tuple[tuple[Kind | str, float], ...] = (
    ("read", 0.25),
    ("test", 0.2),
    ("ask", 0.0),
    ("edit", 0.01),
    ("read", 0.2),
    ("search", 0.14),
    ("ask", 0.0),
)


@dataclass(frozen=True)
class Shape:
    """Shares of the tokens that a session grows to.

    Attributes:
        system, tools: of the system text and of the schemas.
        request: of the user's first message.
        work: the turns after it.
        summary: of what is left at a compaction; 0: there is none.
        compact_before: the turn of `work` before which that is.
        agents: how many sessions run side by side, each with a system text of its own.
    """

    system: float = 0.1
    tools: float = 0.15
    request: float = 0.02
    work: tuple[tuple[Kind | str, float], ...] = WORK
    summary: float = 0.0
    compact_before: int = 6
    agents: int = 1


KINDS = {
    "growth": Shape(),
    "short": Shape(system=0.07, tools=0.11, work=SHORT),
    "compaction": Shape(summary=0.05),
    "side by side": Shape(agents=2, work=WORK[:6]),
}


@dataclass(frozen=True)
class Step:
    """What is said before a request, and what its answer has to hold.

    Attributes:
        said: a tool's result, or what the user says.
        call: what the model is taken to have called for it; None: the user speaks.
        code: what the answer has to hold; "": nothing is asked.
        fresh: the conversation begins anew with it, behind the same system text and tools.
    """

    said: str
    call: tuple[str, dict[str, Any]] | None = None
    code: str = ""
    fresh: bool = False

    def messages(self, number: int) -> list[Message]:
        """As a client appends them. A call is a message of its own: what the model really said precedes it."""
        if self.call is None:
            return [{"role": "user", "content": self.said}]
        name, arguments = self.call
        call = {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        return [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{number}", "name": name, "content": self.said},
        ]


@dataclass(frozen=True)
class Session:
    """One conversation.

    Attributes:
        after: questions for what the steps have not asked for, to be sent when the clock has stopped.
        opening: tokens of the system text and the tools, about.
    """

    system: str
    tools: list[dict[str, Any]]
    steps: tuple[Step, ...]
    after: tuple[Step, ...] = ()
    opening: int = 0

    def again(self, other: Session) -> Session:
        """Another conversation in the same repository: its system text and tools are this one's."""
        return replace(other, system=self.system, tools=self.tools, opening=self.opening)


@dataclass
class _Facts:
    """What was said and not asked for yet, oldest first: name and code."""

    rng: random.Random
    known: list[tuple[str, str]] = field(default_factory=list)

    def new(self) -> str:
        taken = {name for name, _ in self.known}
        while (name := words.person(self.rng, held_out=True)) in taken:
            pass
        code = six_digits(self.rng)
        self.known.append((name, code))
        return secret(name, code)

    def asked(self, at: int) -> Step:
        name, code = self.known.pop(at)
        return Step(question(name), code=code)


def make_session(shape: Shape, tokens: int, seed: int | str, count: Count) -> Session:
    """A session that grows to about so many tokens.

    Args:
        count: tokens of a text.
    """
    rng = random.Random(f"agents/{seed}")
    facts = _Facts(rng)
    system = agent_text.instructions(rng, round(shape.system * tokens), count)
    schemas = agent_text.tools(rng, round(shape.tools * tokens), count)
    steps = [Step(agent_text.task(rng, round(shape.request * tokens), count))]
    for number, (kind, share) in enumerate(shape.work):
        if shape.summary and number == shape.compact_before:
            facts.known.clear()
            steps.append(_summary(rng, round(shape.summary * tokens), count, facts))
        if kind == "ask":
            steps.append(facts.asked((0, -1, len(facts.known) // 2)[number % 3]))
        else:
            steps.append(_worked(kind, rng, round(share * tokens), count, facts))
    opening = count(system) + sum(count(json.dumps(schema) + "\n") for schema in schemas)
    return Session(system, schemas, tuple(steps), tuple(_rest(facts)), opening)


def _rest(facts: _Facts) -> Sequence[Step]:
    return [facts.asked(0) for _ in range(len(facts.known))]


def _worked(kind: Any, rng: random.Random, tokens: int, count: Count, facts: _Facts) -> Step:
    fact = "" if kind == "edit" else facts.new()
    call = agent_text.call_of(kind, rng)
    left = tokens - count(json.dumps(call)) - count(fact)
    return Step(agent_text.result(kind, rng, left, count, fact), call)


def _summary(rng: random.Random, tokens: int, count: Count, facts: _Facts) -> Step:
    """What an agent begins anew with when its context is nearly full."""
    done = agent_text.result("edit", rng, tokens, count, facts.new())
    return Step(f"This is what was done before:\n{done}\n\nGo on with the task.", fresh=True)
