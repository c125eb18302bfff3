"""Tools in the size and shape that MCP servers have them: some 300 tokens of schema each. The words are our own."""

from __future__ import annotations

import random
from typing import Any

from .agent_sessions import Count

VERBS = "list get create update delete search merge assign archive restore export import".split()
NOUNS = "issue pull_request branch document calendar_event message channel page database row invoice ticket".split()
SERVICES = "tracker forge drive mail chat wiki sheets billing desk".split()
FIELDS = "owner project state labels assignee since until page per_page sort query title body".split()
SAID = (
    "Only entries that match are returned.",
    "ISO 8601, with the time zone.",
    "Leave it out for all that you may read.",
    "At most 100; the default is 30.",
    "The name as it stands in the address, without the leading sign.",
    "Separate several by commas.",
)
FINDER = {
    "name": "find_tools",
    "description": "Finds tools by words of their names and descriptions.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}


def mcp_tools(count: int, tokens: int, seed: str, measure: Count) -> list[dict[str, Any]]:
    """Return functions with different names, each of about so many tokens as JSON."""
    rng = random.Random(f"tools/{seed}")
    names = [f"{service}__{verb}_{noun}" for service in SERVICES for verb in VERBS for noun in NOUNS]
    return [_tool(name, tokens, rng, measure) for name in rng.sample(names, count)]


def _tool(name: str, tokens: int, rng: random.Random, measure: Count) -> dict[str, Any]:
    service, _, action = name.partition("__")
    said = f"{action.replace('_', ' ').capitalize()} in the {service}. {rng.choice(SAID)}"
    properties: dict[str, Any] = {}
    function = {
        "name": name,
        "description": said,
        "parameters": {"type": "object", "properties": properties, "required": ["owner"]},
    }
    for field in ["owner", *rng.sample(FIELDS[1:], len(FIELDS) - 1)]:
        if measure(str(function)) >= tokens:
            break
        properties[field] = {"type": "string", "description": f"The {field} of the {action}. {rng.choice(SAID)}"}
    return function
