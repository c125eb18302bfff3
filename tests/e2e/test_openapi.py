"""The whole API as its own document describes it, against the real server: whatever is sent, nothing is a 5xx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import status_code_conformance

from tests.support.scripted import SCRIPTS, Flavour
from tests.support.serving import Server

pytestmark = pytest.mark.extended

BOUNDED = settings(
    max_examples=25,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def api(scripted: Callable[[Flavour], Server]) -> Any:
    return schemathesis.openapi.from_url(f"{scripted('hermes').base}/openapi.json")


def _bound(body: Any) -> None:
    """A model that recites scripts never comes to the end of a grammar."""
    for name in ("max_tokens", "max_output_tokens", "max_completion_tokens") if isinstance(body, dict) else ():
        if body.get(name) is None or (isinstance(body[name], int) and (body[name] > 8 or body[name] == -1)):
            body[name] = 8


@pytest.mark.parametrize(
    "mode", [GenerationMode.NEGATIVE, pytest.param(GenerationMode.POSITIVE, marks=pytest.mark.nightly)]
)
def test_nothing_is_a_server_error(api: Any, mode: GenerationMode) -> None:
    """`mode`: requests that the document allows, and others."""
    called = set()
    for operation in (result.ok() for result in api.get_all_operations()):
        if mode is GenerationMode.NEGATIVE and (operation.method != "post" or not operation.body):
            continue  # nothing to get wrong

        @BOUNDED
        @given(case=operation.as_strategy(generation_mode=mode))
        def call(case: Any) -> None:
            _bound(case.body)
            answer = case.call(timeout=60)
            case.validate_response(answer, checks=[not_a_server_error, status_code_conformance])

        call()
        called.add(operation.path)
    assert called >= {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"}


def test_the_server_lives_on(scripted: Callable[[Flavour], Server]) -> None:
    server = scripted("hermes")
    server.wait_until(running=0)
    body = {"messages": [{"role": "user", "content": "script:words"}]}
    answer = httpx.post(f"{server.base}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == SCRIPTS["words"].turns[0].text
