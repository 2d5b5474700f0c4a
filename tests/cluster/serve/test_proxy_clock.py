"""The proxy's HTTP server with a slow clock still serves the present date, and ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn

from transom_cluster.serve import proxy_clock


async def app(scope: Any, receive: Any, send: Any) -> None:
    raise NotImplementedError


def test_a_server_renews_its_date_at_each_look_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn.Server, "main_loop", uvicorn.Server.main_loop)
    monkeypatch.setattr(proxy_clock, "LOOK_S", 0.0)
    assert proxy_clock.slow_clock() == []
    server = uvicorn.Server(uvicorn.Config(app))
    dates = []

    async def end_after_three_looks() -> None:
        for _ in range(3):
            server.server_state.default_headers = []
            while not server.server_state.default_headers:
                await asyncio.sleep(0)
            dates.append(dict(server.server_state.default_headers)[b"date"])
        server.should_exit = True

    async def run() -> None:
        await asyncio.wait_for(asyncio.gather(server.main_loop(), end_after_three_looks()), 60)

    asyncio.run(run())
    assert len(dates) == 3
    assert all(date.endswith(b"GMT") for date in dates)
