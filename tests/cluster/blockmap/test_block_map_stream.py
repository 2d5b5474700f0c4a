"""The block map over HTTP: files without a key, streams of all workers merged, clients that are slow or leave; and what a real
engine's thread sends to a client's socket."""

import asyncio
import base64
import contextlib
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from tests.block_map_decoder import ACTIVE, HELD, LOOSE, Map
from tests.cluster import conftest
from tests.cluster.asgi_call import AsgiCall
from tests.cluster.conftest import Api, timings, until
from tests.cluster.engine_server import EngineServer, engine_server
from tests.cluster.stub_worker import StubWorker
from transom_cluster.blockmap.feed import MAX_UNSENT
from transom_cluster.http.api import build_api
from transom_core.errors import Overloaded

WITHOUT_PAUSES = timings(block_map_poll_s=0.001, first_feed_pause_s=0.0)
WAIT_S = 120


def running_api(*workers: StubWorker, **values: Any) -> AbstractAsyncContextManager[Api]:
    return conftest.running_api(*workers, **{"timings": WITHOUT_PAUSES, **values})


class StreamCall(AsgiCall):
    """A client that reads the stream; it takes nothing more while `is_stuck`."""

    def __init__(self, api: Api, path: str, query: str = "") -> None:
        self.is_stuck = False
        self._go = asyncio.Event()
        super().__init__(build_api(api.router), path, {}, method="GET", body_so_far=b"", query=query)

    @property
    def has_ended(self) -> bool:
        return not self.sent[-1].get("more_body", True)

    def events(self, kind: str) -> list[Any]:
        found = []
        for part in self.text.split("\n\n"):
            name, _, data = part.partition("\n")
            if name == f"event: {kind}":
                data = data.removeprefix("data: ")
                found.append(base64.b64decode(data) if kind == "frame" else json.loads(data))
        return found

    def go_on(self) -> None:
        self.is_stuck = False
        self._go.set()

    async def _send(self, message: Mapping[str, Any]) -> None:
        if self.is_stuck:
            await self._go.wait()
        await super()._send(message)


@contextlib.asynccontextmanager
async def streaming(api: Api, query: str = "") -> AsyncIterator[StreamCall]:
    call = StreamCall(api, "/blocks/stream", query)
    try:
        yield call
    finally:
        await call.leave()


def watched(*workers: StubWorker) -> Callable[[], bool]:
    return lambda: all(worker.watchers for worker in workers)


async def test_frames_of_all_workers_come_in_one_stream_while_workers_come_and_go():
    first, second, late = StubWorker(worker="a"), StubWorker(worker="b"), StubWorker(worker="late")
    async with running_api(first, second) as api, streaming(api, "period_s=2") as call:
        await until(watched(first, second))
        first.watchers[0].put_nowait(b"\0one")
        second.watchers[0].put_nowait(b"two")
        await until(lambda: len(call.events("frame")) == 2)
        assert (call.status, sorted(call.events("frame"))) == (200, [b"\0one", b"two"])
        assert dict(call.sent[0]["headers"])[b"content-type"].startswith(b"text/event-stream")
        (workers,) = call.events("workers")
        assert workers == [{"worker": name, "model": "stub", "state": "open"} for name in ("a", "b")]
        assert (first.watch_periods_s, second.watch_periods_s) == ([2.0], [2.0])
        api.directory.add(late)
        await until(watched(late))
        api.directory.remove(first)
        await until(lambda: [one["worker"] for one in call.events("workers")[-1]] == ["b", "late"])
        await until(lambda: not first.watchers)
        late.watchers[0].put_nowait(b"here")
        await until(lambda: call.events("frame")[-1] == b"here")
    await until(lambda: not second.watchers and not late.watchers)  # the client left


async def test_one_worker_alone_can_be_watched():
    first, second = StubWorker(worker="a"), StubWorker(worker="b")
    async with running_api(first, second) as api, streaming(api, "worker=b") as call:
        await until(watched(second))
        assert [one["worker"] for one in call.events("workers")[0]] == ["b"]
        assert not first.watch_periods_s


async def test_a_stream_that_breaks_is_told_once_and_begun_again():
    worker = StubWorker()
    async with running_api(worker) as api, streaming(api) as call:
        await until(watched(worker))
        broken = worker.watchers[0]
        broken.put_nowait(ConnectionError("secret details"))
        await until(lambda: worker.watchers and worker.watchers[0] is not broken)
        (problem,) = call.events("problem")
        assert problem["worker"] == "w0"
        assert "ConnectionError" in problem["message"]
        assert "secret" not in call.text
        worker.watchers[0].put_nowait(b"again")
        await until(lambda: call.events("frame") == [b"again"])


async def test_a_worker_with_too_many_watchers_says_so_and_others_go_on():
    full, other = StubWorker(worker="full", watch_failure=Overloaded("16 others watch")), StubWorker(worker="other")
    async with running_api(full, other) as api, streaming(api) as call:
        await until(watched(other))
        await until(lambda: len(full.watch_periods_s) > 3)
        assert call.events("problem") == [{"worker": "full", "message": "16 others watch"}]
        full.watch_failure = None
        await until(watched(full))


async def test_a_slow_client_loses_frames_instead_of_piling_them_up():
    slow, other = StubWorker(worker="a"), StubWorker(worker="b")
    async with running_api(slow, other) as api, streaming(api) as call:
        await until(watched(slow, other))
        await until(lambda: call.events("workers"))
        call.is_stuck = True
        for number in range(10):
            for queue in slow.watchers:
                queue.put_nowait(b"%d" % number)
            await asyncio.sleep(0)
        await until(lambda: not slow.watchers)  # its stream is given up
        assert other.watchers  # the other's is not: nothing of it waits
        call.go_on()
        await until(watched(slow))  # and begun anew
        told = call.events("frame")
        assert told == [b"%d" % number for number in range(len(told))]
        assert len(told) <= MAX_UNSENT + 1
        slow.watchers[0].put_nowait(b"whole")
        await until(lambda: call.events("frame")[-1] == b"whole")
        assert not call.events("problem")


async def test_the_stream_ends_when_the_router_drains():
    worker = StubWorker()
    async with running_api(worker) as api, streaming(api) as call:
        await until(watched(worker))
        api.router.begin_drain()
        await until(lambda: call.has_ended)
        await until(lambda: not worker.watchers)


async def test_silence_is_broken_by_comments():
    async with running_api(timings=replace(WITHOUT_PAUSES, block_map_keepalive_s=0.0)) as api, streaming(api) as call:
        await until(lambda: call.text.count(": still here\n\n") > 2)


@pytest.mark.parametrize(("given", "used"), [("0.001", 0.1), ("0.25", 0.25), ("99", 10.0)])
async def test_periods_are_clamped(given: str, used: float):
    async with running_api() as api, streaming(api, f"period_s={given}"):
        await until(watched(api.worker))
        assert api.worker.watch_periods_s == [used]


@pytest.mark.parametrize("given", ["0", "-1", "soon", "nan", "inf", ""])
async def test_periods_that_mean_nothing_are_refused(api: Api, given: str):
    response = await api.client.get("/blocks/stream", params={"period_s": given})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "period_s")


async def test_unknown_workers_are_not_found(api: Api):
    for path in ("/blocks/stream?worker=unknown", "/blocks/describe?worker=unknown&group=0&block=1"):
        response = await api.client.get(path)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (404, "worker", "worker_not_found")
        assert all(word in error["message"] for word in ("'unknown'", "w0"))


async def test_a_block_is_described(api: Api):
    response = await api.client.get("/blocks/describe?worker=w0&group=0&block=7")
    assert response.json() == {"worker": "w0", "group": 0, "block": 7, "state": "active", "tier": "device"}
    response = await api.client.get("/blocks/describe?worker=w0&group=0&block=7&tier=host")
    assert response.json()["tier"] == "host"
    assert (await api.client.get("/blocks/describe?worker=w0&group=0&block=7&tier=tape")).status_code == 400
    response = await api.client.get("/blocks/describe?worker=w0&group=3&block=7")
    assert (response.status_code, response.json()["error"]["message"]) == (404, "There is no group 3.")
    assert (await api.client.get("/blocks/describe?worker=w0&group=0")).status_code == 400
    api.worker.is_dead = True
    response = await api.client.get("/blocks/describe?worker=w0&group=0&block=7")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "worker_unavailable")


async def test_files_need_no_key_and_data_does():
    async with running_api(api_keys=("secret",)) as api:
        page = await api.client.get("/blocks")
        assert page.status_code == 200
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'self'" in page.headers["content-security-policy"]
        script = await api.client.get("/blocks/assets/frames.js")
        assert script.headers["content-type"].startswith("text/javascript")
        again = await api.client.get("/blocks/assets/frames.js", headers={"if-none-match": script.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        for path in ("/blocks/stream", "/blocks/describe?worker=w0&group=0&block=0", "/blocks/", "/blocks/assets"):
            assert (await api.client.get(path)).status_code == 401, path


@pytest.mark.parametrize(
    "name",
    [
        "../routes.py", "..%2froutes.py", "..", ".", "%2e%2e", "nothing.js", "frames.js%00", "frames.JS", ".hidden.js",
        "a/b.js", "",
    ],
)  # fmt: skip
async def test_only_the_pages_own_files_are_served(api: Api, name: str):
    for path in (name, unquote(name)):  # as a client sends it: nothing between tidies it up
        call = StreamCall(api, f"/blocks/assets/{path}")
        await call.task
        assert call.status == 404


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


@pytest.mark.usefixtures("torch_operators")
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
