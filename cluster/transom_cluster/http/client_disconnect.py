"""`until_disconnect`: awaits work for a client, and cancels it when the client disconnects."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

Result = TypeVar("Result")


async def until_disconnect(
    work: Coroutine[Any, Any, Result], receive: Receive, *, on_disconnect: Callable[[], None] = lambda: None
) -> Result:
    """Await `work`; return its result, or raise its error. The request's body must have been read before.

    Raises:
        ClientDisconnect: the client has disconnected first. `on_disconnect` was called, and then `work` was cancelled.
    """
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        left.cancel()
        if not task.done():
            on_disconnect()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
