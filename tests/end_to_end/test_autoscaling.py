"""The number of workers follows a load ramp: none to one, to two, and back to none, and no answer suffers."""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server_process import Server, start_server
from tests.end_to_end.server import HTTP, PATIENCE_S, assert_ended_cleanly, look_until
from tests.end_to_end.streams import Stream, ask_until, bodies, items

pytestmark = [pytest.mark.exhaustive, pytest.mark.serve, pytest.mark.timeout(1800)]  # the sum of all patience


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    workers = {"min_replicas": 0, "max_replicas": 2, "kv_cache_memory_bytes": "16MiB", "max_num_seqs": 8}
    pace = {"first_token_objective_s": 1, "upscale_delay_s": 1, "downscale_delay_s": 2, "worker_wait_s": PATIENCE_S}
    with start_server(str(tiny_model), **workers, **pace) as server:
        yield server
        assert_ended_cleanly(server)


async def until_workers(server: Server, count: int) -> None:
    """Wait until this number of workers takes requests."""

    def num_open() -> int:
        return sum(worker["state"] == "open" for worker in HTTP.get(server.url).json()["workers"])

    await asyncio.to_thread(look_until, num_open, lambda found: found == count)


async def answers_until(server: Server, *, becomes: int, num_clients: int, max_tokens: int) -> list[Stream]:
    """`num_clients` clients ask again and again until there are `becomes` workers; their answers."""
    is_over = False
    requests = [itertools.repeat(body) for body in bodies(items(num_clients), max_tokens=max_tokens)]
    asking = asyncio.create_task(ask_until(server.url, requests, lambda: is_over))
    await until_workers(server, becomes)
    is_over = True
    return [answer for rounds in await asking for answer in rounds]


def test_workers_follow_the_load(server: Server) -> None:
    async def ramp() -> None:
        await until_workers(server, 0)  # idle since the first answer
        # a request starts a worker where there is none; a crowd, which a single one cannot carry, a second
        answers = await answers_until(server, becomes=1, num_clients=1, max_tokens=5)
        answers += await answers_until(server, becomes=2, num_clients=24, max_tokens=60)
        # two fit one worker however their counts are rounded, those that wait included
        answers += await answers_until(server, becomes=1, num_clients=2, max_tokens=400)
        await until_workers(server, 0)
        assert len(answers) >= 1 + 24 + 2
        assert [answer.error for answer in answers] == [None] * len(answers)
        assert all(answer.is_whole for answer in answers)
        assert {answer.usage["completion_tokens"] for answer in answers if answer.usage} == {5, 60, 400}

    asyncio.run(ramp())
