"""Work for a client, cancelled when the client hangs up or its request has no time left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from .access_log import current_deadline

T = TypeVar("T")


async def client_left(receive: Receive) -> None:
    """Return when the client has left. The body has been read, so no other message can follow."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it as soon as the client hangs up.

    Raises:
        ClientDisconnect: the client left.
        DeadlineError: the request has no time left.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(client_left(request.receive))
    deadline = current_deadline()
    left = None if deadline is None else deadline[0] - asyncio.get_running_loop().time()
    try:
        await asyncio.wait((task, watch), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect if deadline is None or watch.done() else deadline[1]
        return await task
    finally:
        task.cancel()
        watch.cancel()
