"""An MCP server on standard input and output with some tools; the one that is used leaves a file behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
TOOLS = [
    {"name": f"{verb}_note", "description": f"Can {verb} a note by its number.", "inputSchema": NUMBER}
    for verb in ("read", "print", "burn")
]


def answer(method: str, params: Any) -> Any:
    match method:
        case "initialize":
            version = params["protocolVersion"]
            about = {"name": "notes", "version": "1"}
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
        case "tools/list":
            return {"tools": TOOLS}
        case "tools/call":
            Path("called.json").write_text(json.dumps(params))
            return {"content": [{"type": "text", "text": "It says: buy bread."}]}
    return {}


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            result = answer(message["method"], message.get("params"))
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)


if __name__ == "__main__":
    main()
