"""Work for a client, for as long as the client is there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import Receive


async def run_until_disconnect(
    work: Coroutine[Any, Any, None], receive: Receive, *, left: Callable[[], None] | None = None
) -> None:
    """Do `work` to its end, whatever it raises; where the client leaves first, call `left` and cancel it."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        gone.cancel()
        if not task.done():
            if left is not None:
                left()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnected(receive: Receive) -> None:
    """Return once the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
