"""The number of workers follows a load ramp: none to two and back to none, and no answer suffers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server import Server, assert_ended_cleanly, start_server, stop_server
from streams import ask_until, bodies, client_of

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1200)]  # the sum of all patience

PATIENCE_S = 200.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    server = start_server(
        str(tiny_model),
        tmp_path_factory.mktemp("autoscaling") / "log",
        *("--min-replicas", "0", "--max-replicas", "2", "--kv-cache-memory-bytes", "16MiB", "--max-num-seqs", "8"),
        *("--first-token-objective-s", "1", "--upscale-delay-s", "1", "--downscale-delay-s", "4"),
    )
    yield server
    assert_ended_cleanly(server, stop_server(server))


async def num_workers(client: httpx.AsyncClient, *, becomes: int) -> int:
    """The number of workers that take requests, as soon as it is `becomes`, or at last."""
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        workers = (await client.get("/")).json()["workers"]
        count = sum(worker["state"] == "open" for worker in workers)
        if count == becomes or time.monotonic() > give_up_s:
            return count
        await asyncio.sleep(0.1)


def test_workers_follow_the_load(server: Server) -> None:
    async def ramp() -> None:
        is_over = is_one = False
        async with client_of(server.url) as client:
            assert await num_workers(client, becomes=0) == 0  # idle since the first answer
            load = asyncio.create_task(ask_until(server.url, bodies(24, max_tokens=60), lambda: is_over))
            assert await num_workers(client, becomes=2) == 2
            less = asyncio.create_task(ask_until(server.url, bodies(4, max_tokens=1000), lambda: is_one))
            is_over = True
            answers = [answer for rounds in await load for answer in rounds]
            assert await num_workers(client, becomes=1) == 1
            is_one = True
            answers += [answer for rounds in await less for answer in rounds]
            assert await num_workers(client, becomes=0) == 0
        assert [answer.error for answer in answers] == [None] * len(answers)
        assert all(answer.is_whole for answer in answers)
        assert {answer.usage["completion_tokens"] for answer in answers if answer.usage} == {60, 1000}

    asyncio.run(ramp())


def test_a_request_starts_a_worker_where_there_is_none(server: Server) -> None:
    async def wake() -> None:
        is_seen = False
        async with client_of(server.url) as client:
            assert await num_workers(client, becomes=0) == 0
            asking = asyncio.create_task(ask_until(server.url, bodies(1, max_tokens=5), lambda: is_seen))
            assert await num_workers(client, becomes=1) == 1
            is_seen = True
            (answers,) = await asking
            assert all(answer.is_whole and answer.error is None for answer in answers)

    asyncio.run(wake())
