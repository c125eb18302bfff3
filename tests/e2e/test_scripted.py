"""Every script recited by the real server: whatever the answer is made of, it is exactly what the model wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.support.scripted import SCRIPTS, TEXT, Flavour, save_scripted, written
from tests.support.serving import Server, start

UNMEASURED = ("--specprefill-threshold", "8192")
WHOLE = [name for name, script in SCRIPTS.items() if not script.endless]


def complete(server: Server, prompt: str, **fields: object) -> dict[str, object]:
    answer = httpx.post(f"{server.base}/v1/completions", json={"prompt": prompt, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    choice: dict[str, object] = answer.json()["choices"][0]
    return choice


@pytest.mark.parametrize("flavour", ["hermes", pytest.param("xml", marks=pytest.mark.extended)])
def test_a_raw_prompt_gets_the_whole_script(scripted: Callable[[Flavour], Server], flavour: Flavour) -> None:
    for name in WHOLE:
        for number, turn in enumerate(SCRIPTS[name].turns):
            choice = complete(scripted(flavour), f"say <|{name}:{number}|>")
            assert choice["text"] == written(turn, flavour), name
            assert choice["finish_reason"] == "stop"


def test_an_endless_script_is_ended_by_the_limit(scripted: Callable[[Flavour], Server]) -> None:
    choice = complete(scripted("hermes"), "<|endless:0|>", max_tokens=7)
    assert choice["text"] == "again and again again and again"
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("specprefill", [True, False])
def test_the_conversation_names_the_script(scripted: Callable[[Flavour], Server], specprefill: bool) -> None:
    messages = [{"role": "user", "content": "word " * 400 + "script:words"}]
    body = {"messages": messages, "specprefill": specprefill}
    answer = httpx.post(f"{scripted('hermes').base}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == "alpha beta gamma delta epsilon zeta eta theta"
    assert answer["specprefill"]["mode"] == ("sparse" if specprefill else "full")


def test_a_script_with_calls_needs_tools(scripted: Callable[[Flavour], Server]) -> None:
    body = {"messages": [{"role": "user", "content": "A title for: script:loop"}]}
    answer = httpx.post(f"{scripted('hermes').base}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == TEXT


@pytest.mark.extended
def test_logs_and_metrics_of_the_process(tmp_path: Path) -> None:
    """uvicorn's own records go the same way as ours, at the same level."""
    model = save_scripted(tmp_path / "model")
    log = tmp_path / "log"
    settings = {"MLX_SPECPREFILL_LOG_FORMAT": "json", "MLX_SPECPREFILL_STRICT_MODEL": "1"}
    with start(log, model, model, "--model-alias", "me", *UNMEASURED, settings=settings) as server:
        complete(server, "<|words:0|>", model="me")
        refused = httpx.post(f"{server.base}/v1/completions", json={"prompt": "x", "model": "you"})
        scraped = httpx.get(f"{server.base}/metrics").text
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    assert 'vllm:request_success_total{finished_reason="stop",model_name="me"} 1.0' in scraped
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert {"mlx_specprefill_server.running.process", "mlx_specprefill_server.http.access_log"} <= {
        record["logger"] for record in records
    }
    answered = next(record for record in records if record.get("path") == "/v1/completions")
    assert (answered["completion_tokens"], answered["finish"], answered["mode"]) == (10, "stop", "full")
    assert answered["ttft_ms"] > 0
