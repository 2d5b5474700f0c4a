"""The number of workers follows a load ramp: none to one, to two, and back to none, and no answer suffers."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.server_process import Server, start_server
from tests.end_to_end.server import PATIENCE_S, assert_ended_cleanly
from tests.end_to_end.streams import Stream, ask_until, bodies, client_of, items

pytestmark = [pytest.mark.exhaustive, pytest.mark.serve, pytest.mark.timeout(1800)]  # the sum of all patience


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    workers = {"min_replicas": 0, "max_replicas": 2, "kv_cache_memory_bytes": "16MiB", "max_num_seqs": 8}
    pace = {"first_token_objective_s": 1, "upscale_delay_s": 1, "downscale_delay_s": 2, "worker_wait_s": PATIENCE_S}
    with start_server(str(tiny_model), **workers, **pace) as server:
        yield server
        assert_ended_cleanly(server)


async def num_workers(client: httpx.AsyncClient, *, becomes: int) -> int:
    """The number of workers that take requests, as soon as it is `becomes`, or at last."""
    give_up_s = time.monotonic() + PATIENCE_S
    while True:
        count = sum(worker["state"] == "open" for worker in (await client.get("/")).json()["workers"])
        if count == becomes or time.monotonic() > give_up_s:
            return count
        await asyncio.sleep(0.1)


async def answers_until(
    server: Server, client: httpx.AsyncClient, *, becomes: int, num_clients: int, max_tokens: int
) -> list[Stream]:
    """`num_clients` clients ask again and again until there are `becomes` workers; their answers."""
    is_over = False
    requests = bodies(items(num_clients), max_tokens=max_tokens)
    asking = asyncio.create_task(ask_until(server.url, requests, lambda: is_over))
    assert await num_workers(client, becomes=becomes) == becomes
    is_over = True
    return [answer for rounds in await asking for answer in rounds]


def test_workers_follow_the_load(server: Server) -> None:
    async def ramp() -> None:
        async with client_of(server.url) as client:
            assert await num_workers(client, becomes=0) == 0  # idle since the first answer
            # a request starts a worker where there is none; a crowd, which a single one cannot carry, a second
            answers = await answers_until(server, client, becomes=1, num_clients=1, max_tokens=5)
            answers += await answers_until(server, client, becomes=2, num_clients=24, max_tokens=60)
            # two fit one worker however their counts are rounded, those that wait included
            answers += await answers_until(server, client, becomes=1, num_clients=2, max_tokens=400)
            assert await num_workers(client, becomes=0) == 0
        assert len(answers) >= 1 + 24 + 2
        assert [answer.error for answer in answers] == [None] * len(answers)
        assert all(answer.is_whole for answer in answers)
        assert {answer.usage["completion_tokens"] for answer in answers if answer.usage} == {5, 60, 400}

    asyncio.run(ramp())
