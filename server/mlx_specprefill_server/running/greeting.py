"""The first log lines of a server: its models, when they read sparse, its addresses, an example."""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Iterator, Sequence

from mlx_specprefill import about

from ..http.sockets import address, network_address
from ..models.pool import Models
from ..models.service import Service

_TOKENS = 8192  # of the prompt whose times are predicted


def greeting(models: Models, sockets: Sequence[socket.socket]) -> Iterator[str]:
    """Return the greeting's log lines. They never contain an API key."""
    settings, service = models.state.settings, models.default.service
    if models.several:
        names = ", ".join(entry.id + (" (stays in memory)" if entry.pin else "") for entry in models)
        yield f"serving {names}: each is loaded by its first request, {models.default.id} is the default"
    elif service is not None:
        yield f"serving {service.model_id}: {_draft(service)}, context {service.context_length} tokens"
        yield from expected_times(service)
    if not sockets:
        return
    base = address(sockets[0], reachable=True)
    keyed = bool(settings.api_keys or settings.admin_keys)
    other = "" if (outside := network_address(sockets[0])) is None else f", from other machines {outside}"
    yield f"the page is {base}{other}{'; it needs a key' if keyed else ''}"
    yield f"an example: {_example(base, keyed)}"


def expected_times(service: Service) -> Iterator[str]:
    """Yield what a prompt of 8K tokens will take, if this machine has been measured and the prompt fits."""
    engine, share = service.engine, float(service.settings.specprefill_keep_pct)
    if not engine.is_measured or service.context_length < _TOKENS:
        return
    times = engine.predict(_TOKENS, round(share * _TOKENS))
    sparse = "" if engine.pair.sparse_refusal else f", {about(times.sparse_ms)} sparse"
    if times.steady:
        yield f"{_TOKENS >> 10}K: {about(times.full_ms)} in full{sparse}, predicted"


def _draft(service: Service) -> str:
    pair = service.engine.pair
    if pair.sparse_refusal is not None:
        return f"full prefill only ({pair.sparse_refusal})"
    if service.draft_id is None:
        return "no draft, full prefill only"
    threshold = service.settings.specprefill_threshold
    if not service.settings.specprefill:
        when = "a request sets specprefill"
    else:
        when = "it is predicted to pay" if threshold is None else f"a prompt is longer than {threshold} tokens"
    scorer = "scored by" if pair.scores_itself else "draft"
    return f"{scorer} {service.draft_id}, sparse where {when}"


def _example(base: str, keyed: bool) -> str:
    body = {
        "messages": [{"role": "user", "content": "The code of Paris is 4711. What is the code of Paris?"}],
        "max_tokens": 40,
    }
    key = ' -H "authorization: Bearer $KEY"' if keyed else ""
    return f"curl -s {base}/v1/chat/completions{key} -d {shlex.quote(json.dumps(body))}"
