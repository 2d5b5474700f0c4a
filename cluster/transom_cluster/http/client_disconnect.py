"""Waits for a client's disconnect: runs a coroutine for the client and cancels it then, or raises an error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect
from starlette.types import Receive


async def run_until_disconnect(
    work: Coroutine[Any, Any, None], receive: Receive, *, on_disconnect: Callable[[], None] | None = None
) -> None:
    """Await `work` and raise what it raises. If the client disconnects first, call `on_disconnect` and cancel `work`."""
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        disconnected.cancel()
        if not task.done():
            if on_disconnect is not None:
                on_disconnect()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def raise_on_disconnect(receive: Receive) -> NoReturn:
    """Wait until the client disconnects, then raise ClientDisconnect. The request's body must have been read before."""
    await _wait_for_disconnect(receive)
    raise ClientDisconnect


async def _wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
