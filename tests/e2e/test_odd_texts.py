"""Texts of tools that are not lines of prose: read in part, answered, and counted, by a real server."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.serving import Server

from .conftest import filler

QUESTION = "What is the secret code for Clara?"
FACT = "The secret code for Clara is 471128."
PROSE = " ".join(filler(900, 5))
PNG = (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)) * 8).decode("latin-1")
ODD = {
    "a NUL": f"{PROSE}\0 {FACT} {PROSE}",
    "a byte order mark": f"\ufeff{PROSE} {FACT} {PROSE}",
    "half a surrogate": f"{PROSE} \ufffd {FACT} {PROSE}",
    "a picture": f"{PNG} {FACT} {PROSE}",
    "one line": f"{PROSE} {FACT} {PROSE}".replace(". ", "; "),  # without the end of a sentence
}
pytestmark = pytest.mark.extended
MOST_KEPT = 0.75  # of the prompt's tokens


def said(server: Server, result: str, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"{result}\n\n{QUESTION}"}
    body = {"model": "target", "messages": [message], "max_tokens": 24, "temperature": 0, **fields}
    answer = httpx.post(f"{server.base}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("kind", ODD)
def test_a_fact_in_an_odd_text_is_found(server: Server, kind: str) -> None:
    answer = said(server, ODD[kind], specprefill=True)
    report = answer["specprefill"]
    assert report["mode"] == "sparse"
    assert report["kept_tokens"] < MOST_KEPT * report["prompt_tokens"]
    assert "471128" in answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("sign", ["Z", "="])
def test_one_sign_many_times_is_counted_and_refused_or_read(server: Server, sign: str) -> None:
    """Such a text has crashed tokenizers."""
    body = {"model": "target", "messages": [{"role": "user", "content": sign * 131_072 + f" {QUESTION}"}]}
    counted = httpx.post(f"{server.base}/v1/chat/completions/input_tokens", json=body, timeout=60)
    answer = httpx.post(f"{server.base}/v1/chat/completions", json=body | {"max_tokens": 4}, timeout=300)
    assert {counted.status_code, answer.status_code} <= {200, 400}
    assert answer.status_code == 200 or "context length" in answer.text
    assert "4711" in said(server, "The secret code for Clara is 4711.")["choices"][0]["message"]["content"]
