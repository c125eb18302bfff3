"""The refusals of conversations in the three dialects and of decisions: their paths and their words.

`refusals.json` has what each dialect says to a body with one mistake, by place and value. A line that changes there
changes what clients see. `python -m tests.server.test_refusals` writes the file anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from mlx_specprefill import InvalidRequestError
from mlx_specprefill_server.anthropic.protocol import MessagesRequest
from mlx_specprefill_server.anthropic.protocol import refuse as refuse_messages
from mlx_specprefill_server.http.errors import ApiError
from mlx_specprefill_server.openai.chat import ChatRequest, refuse_chat
from mlx_specprefill_server.openai.decisions import DecisionsRequest
from mlx_specprefill_server.openai.responses_protocol import ResponsesRequest
from mlx_specprefill_server.openai.responses_protocol import refuse as refuse_responses
from mlx_specprefill_server.prompt.conversation import Conversation
from mlx_specprefill_server.request_body import parse_json, validate
from tests.support import bad_bodies

RECORDED = Path(__file__).parents[1] / "data" / "refusals.json"
DIALECTS: dict[str, tuple[Any, Callable[[Any], None], dict[str, Any]]] = {
    "chat": (ChatRequest, refuse_chat, bad_bodies.CHAT),
    "responses": (ResponsesRequest, refuse_responses, bad_bodies.RESPONSES),
    "messages": (MessagesRequest, refuse_messages, bad_bodies.MESSAGES),
    "decisions": (DecisionsRequest, lambda body: None, bad_bodies.DECISIONS),
}


def read(dialect: str, body: dict[str, Any]) -> Conversation | str:
    """Return a body's conversation, or its refusal with the path of the field in front."""
    model, check, _ = DIALECTS[dialect]
    try:
        given = parse_json(orjson.dumps(body))
        check(given)
        parsed = validate(model, given)
        talk: Conversation = parsed.conversation()
        if dialect != "decisions":
            parsed.choice(), parsed.output()
    except InvalidRequestError as error:
        return f"{error.field}| {error}".replace(f"{error.field}| {error.field}: ", f"{error.field}| ")
    except ApiError as error:
        return f"{error.param}| {error}"
    return talk


def refusals(dialect: str) -> dict[str, dict[str, str]]:
    """Return by place, for each refusal there, the values that it answers."""
    table: dict[str, dict[str, str]] = {}
    for way, value, body in bad_bodies.mistakes(dialect, DIALECTS[dialect][2]):
        if isinstance(said := read(dialect, body), str):
            said = said.replace(f"got {value!r}", "got …")
            given = table.setdefault(".".join(map(str, way)), {})
            given[said] = " ".join(filter(None, (given.get(said), str(value).replace(" ", ""))))
    return table


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_body_without_a_mistake_is_read(dialect: str) -> None:
    assert not isinstance(read(dialect, DIALECTS[dialect][2]), str)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_refusals_are_as_recorded(dialect: str) -> None:
    assert refusals(dialect) == json.loads(RECORDED.read_text(encoding="utf-8"))[dialect]


if __name__ == "__main__":
    tables = {dialect: refusals(dialect) for dialect in DIALECTS}
    RECORDED.write_text(json.dumps(tables, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
