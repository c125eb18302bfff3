"""A prompt is the same as last time where the difference says nothing to a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from mlx_specprefill import Finished, GenerationRequest, PrefixMiss
from mlx_specprefill_server.cli import app

from . import templates
from .conftest import client_of
from .conftest import live as live
from .fakes import FakeEngine, FakePair, Step, byte_tokenizer, report_of

URL = "/v1/chat/completions"
HEADER = "x-anthropic-billing-header: cc_version=2.1.330.{}; cc_entrypoint=sdk-cli;"
ASK = [{"role": "user", "content": "Read a.txt"}]
KEYS = ("anna", "bert")


def tools(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine(FakePair(tokenizer=byte_tokenizer(templates.QWEN_3), context_length=1 << 16))
    yield fake
    fake.close()


def prompt(engine: FakeEngine) -> str:
    return str(engine.pair.tokenizer.decode(list(engine.requests[-1].prompt)))


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_lines_that_change_with_each_session_are_left_out(engine: FakeEngine, dialect: str) -> None:
    client, prompts = client_of(engine), set()
    for session in ("ce0", "d17"):
        header = HEADER.format(session)
        if dialect == "chat":
            body = {"messages": [{"role": "system", "content": f"{header}\nBe kind."}, *ASK]}
            answer = client.post(URL, json=body)
        else:
            system = [{"type": "text", "text": header}, {"type": "text", "text": "Be kind."}]
            answer = client.post("/v1/messages", json={"max_tokens": 9, "system": system, "messages": ASK})
        assert answer.status_code == 200, answer.text
        assert "Claude Code's billing header" in str(answer.json()["warnings"])
        prompts.add(prompt(engine))
    assert len(prompts) == 1
    assert "billing" not in prompt(engine)


def test_tools_keep_the_order_of_the_first_request(engine: FakeEngine) -> None:
    client = client_of(engine, api_keys=KEYS)

    def sent(*names: str, key: str = "anna") -> str:
        headers = {"authorization": f"Bearer {key}"}
        answer = client.post(URL, headers=headers, json={"messages": ASK, "tools": tools(*names)})
        assert answer.status_code == 200
        return prompt(engine)

    first = sent("read", "write", "grep")
    assert sent("grep", "read", "write") == first
    assert sent("grep", "read", "write", key="bert") != first
    assert sent("grep", "read") != first
    assert sent("write", "grep", "read") == first


MISS = PrefixMiss("time", 12, 0, "system", 5000, "It is ", "12:41", "12:42")


def missed(engine: FakeEngine) -> None:
    def script(request: GenerationRequest) -> list[Step]:
        return [Finished("stop", 0, replace(report_of(request), miss=MISS))]

    engine.script = script


def test_the_log_tells_place_and_kind_without_text(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    missed(engine)
    with caplog.at_level("INFO"):
        told = client_of(engine).post(URL, json={"messages": ASK}).json()["specprefill"]["cache"]["miss"]
    assert (told["was"], told["now"], told["token"], told["kind"]) == ("12:41", "12:42", 12, "time")
    (fields,) = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert (fields["miss_token"], fields["miss_kind"]) == (12, "time")
    assert "12:4" not in caplog.text + str(fields)


def test_inspect_tells_the_misses_of_a_running_server(engine: FakeEngine, live: Any) -> None:
    base, _ = live(api_keys=("anna",))
    options = ["inspect", "--misses", "--url", f"{base}/v1", "--api-key", "anna"]
    assert "None of the last 0" in CliRunner().invoke(app, options).output
    missed(engine)
    httpx.post(f"{base}{URL}", headers={"authorization": "Bearer anna"}, json={"messages": ASK}).raise_for_status()
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    assert "message 0 (system) differs (time): '12:41' -> '12:42'; 5000 tokens were read again" in result.output
    refused = CliRunner().invoke(app, ["inspect", "--misses", "--url", base])
    assert (refused.exit_code, "/v1/specprefill/stats" in refused.output) == (2, True)
    assert "--prompt-file or --misses" in CliRunner().invoke(app, ["inspect"]).output
