"""The OpenAPI document names every path, and the bodies that endpoints parse by hand."""

from __future__ import annotations

from typing import Any

from starlette.testclient import TestClient

from .conftest import client_of
from .fakes import FakeEngine

BARE = ("/load", "/unload")  # the path says all


def test_every_post_has_its_body(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert ("requestBody" in operation) == (method == "post" and not path.endswith(BARE)), path
            assert {"4XX", "5XX"} <= operation["responses"].keys()


def test_forms_that_validators_accept_are_there(client: TestClient) -> None:
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    completion = schemas["CompletionRequest"]["properties"]
    assert completion["prompt"]["anyOf"][0] == {"type": "string"}
    assert completion["specprefill_keep_pct"]["anyOf"][0] == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    assert completion["logprobs"]["anyOf"][0]["maximum"] == 20
    assert schemas["ChatRequest"]["required"] == ["messages"]


def test_no_schema_uses_words_of_pydantic_or_lacks_its_parts(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]

    def check(part: Any) -> None:
        if isinstance(part, dict):
            assert not part.keys() & {"ge", "gt", "le", "lt"}
            if isinstance(part.get("$ref"), str):
                assert part["$ref"].rpartition("/")[2] in schemas
            for value in part.values():
                check(value)
        elif isinstance(part, list):
            for value in part:
                check(value)

    check(document)


def test_there_is_no_page_that_needs_other_hosts(client: TestClient) -> None:
    assert client.get("/docs").status_code == 404
    assert client.get("/redoc").status_code == 404


def test_the_document_needs_the_key(engine: FakeEngine) -> None:
    assert client_of(engine, api_keys=("right",)).get("/openapi.json").status_code == 401
