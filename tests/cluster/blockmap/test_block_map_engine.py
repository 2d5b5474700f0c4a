"""The block map from a real engine's thread to a client's socket."""

import asyncio
import base64
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.block_map_decoder import ACTIVE, HELD, LOOSE, Map
from tests.cluster.conftest import until
from tests.cluster.engine_server import EngineServer, engine_server

pytestmark = pytest.mark.usefixtures("torch_operators")
WAIT_S = 120


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[EngineServer]:
    with engine_server(tiny_model, kv_cache_memory_bytes="4MiB", max_num_seqs=4, num_threads=1) as running:
        yield running


@contextlib.asynccontextmanager
async def frames_of(server: EngineServer) -> AsyncIterator[AsyncIterator[bytes]]:
    async def read(response: httpx.Response) -> AsyncGenerator[bytes, None]:
        event = ""
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif line.startswith("data: ") and event == "frame":
                yield base64.b64decode(line.removeprefix("data: "))

    async with (
        asyncio.timeout(WAIT_S),
        httpx.AsyncClient(base_url=server.url, timeout=WAIT_S) as client,
        client.stream("GET", "/blocks/stream", params={"period_s": 0.1}) as response,
    ):
        assert response.status_code == 200
        async with contextlib.aclosing(read(response)) as frames:
            yield frames


async def ask(server: EngineServer, prompt: str, max_tokens: int) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S) as client:
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        (await client.post("/v1/completions", json=body)).raise_for_status()


@pytest.fixture
def ran(server: EngineServer) -> Iterator[threading.Event]:
    """Steps take longer than it takes to look at them, until this is set."""
    event = threading.Event()
    server.executor.before_step = lambda: event.wait(0.1)
    yield event
    server.executor.before_step = lambda: None


async def test_a_request_is_seen_from_its_admission_to_what_it_leaves_behind(
    server: EngineServer, ran: threading.Event
) -> None:
    seen = Map()
    async with frames_of(server) as frames:
        assert seen.take(await anext(frames)).header["whole"]
        asking = asyncio.create_task(ask(server, "The quick brown fox jumps over the lazy dog. " * 8, 200))
        while "finished" not in {event["kind"] for event in seen.events} or seen.sequences:
            seen.take(await anext(frames))
            if any(block.state == ACTIVE for block in seen.blocks.values()):
                ran.set()
        await asking
        assert ran.is_set()
        cached = [key for key, block in seen.shown.items() if block.state in (HELD, LOOSE)]
        stats = server.replica.engine.scheduler.stats()
        assert len(cached) == sum(group.cached_blocks for group in stats.groups) > 0
        assert seen.header["free_pages"] == stats.free_pages
        group, block = cached[0]
        query: dict[str, Any] = {"worker": "0", "group": group, "block": block}
        async with httpx.AsyncClient(base_url=server.url) as client:
            described = (await client.get("/blocks/describe", params=query)).json()
        assert described["state"] == ("held" if seen.shown[group, block].state == HELD else "loose")
        assert int(described["hash"][:8], 16) == seen.shown[group, block].hash
        assert described["cached_s"] >= 0


async def test_nothing_is_kept_once_all_clients_have_left(server: EngineServer) -> None:
    async with frames_of(server) as frames:
        await anext(frames)
        # the test before has left, which takes a moment
        await until(lambda: len(server.replica.block_map._watchers) == 1)
    registry = server.replica.engine.scheduler.cache.registry
    await until(lambda: not server.replica.block_map._watchers and registry._touched is None)
    await ask(server, "Without a watcher.", 4)
    async with frames_of(server) as frames:  # the next begins where the cache is now
        seen = Map()
        history = seen.take(await anext(frames)).header["history"]
        assert history
        assert [len(entry) for entry in history] == [3] * len(history)
        assert not seen.events
