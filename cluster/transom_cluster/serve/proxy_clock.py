"""Lets the HTTP server of Serve's proxy (uvicorn) look at its clock once a second in place of ten times, so that it sleeps longer.

At each look uvicorn renews the date that its responses have, and ends if it was told to.

Serve calls `slow_clock` in the proxy's process, where RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it.
"""

from __future__ import annotations

import asyncio
from typing import Any

LOOK_S = 1.0


def slow_clock() -> list[Any]:
    """Replace the clock of this process's servers, and return the middlewares that Serve asks for here: none."""
    import uvicorn

    uvicorn.Server.main_loop = _main_loop  # type: ignore[method-assign, assignment]
    return []


async def _main_loop(server: Any) -> None:
    while not await server.on_tick(0):  # every tenth tick, and so tick 0, renews the date
        await asyncio.sleep(LOOK_S)
