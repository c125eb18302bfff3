"""A coding agent with one tool and what `connect` prints: it runs what the model asks for until the last answer.

Real agents do the same where they are installed (`tests/clients`).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from mlx_specprefill_server.cli import app
from tests.support.connected import variables_in
from tests.support.scripted import DONE, Flavour
from tests.support.serving import Server

BASH: Any = {
    "type": "function",
    "function": {
        "name": "Bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


@pytest.mark.extended
def test_an_agent_with_what_connect_prints_completes_its_task(
    scripted: Callable[[Flavour], Server], tmp_path: Path
) -> None:
    arguments = ["connect", "opencode", "--url", scripted("hermes").base]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    configured = json.loads(variables_in(done.stdout)["OPENCODE_CONFIG_CONTENT"])
    options = configured["provider"]["mlx-specprefill"]["options"]
    model = configured["model"].partition("/")[2]
    messages: list[Any] = [{"role": "user", "content": "Please do script:continue now."}]
    with openai.OpenAI(base_url=options["baseURL"], api_key=options["apiKey"], max_retries=0) as agent:
        while True:
            answer = agent.chat.completions.create(model=model, messages=messages, tools=[BASH])
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                break
            for call in said.tool_calls:
                command = json.loads(call.function.arguments)["command"]
                output = subprocess.check_output(["sh", "-c", command], cwd=tmp_path, text=True)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
    assert said.content == DONE
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert (tmp_path / "result.txt").read_text() == "made by a script"
