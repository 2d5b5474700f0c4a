"""A router over a stub worker, with a real HTTP server on a random loopback port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import uvicorn

from tests.cluster.stub_worker import AnyGrammar, ByteTokenizer, StubDirectory, StubWorker
from transom_cluster.http.api import build_api
from transom_cluster.router.router import Router
from transom_cluster.router.timings import RouterTimings
from transom_cluster.routing.placer import Placer
from transom_cluster.telemetry.router_tracing import RouterTracing
from transom_core.config import FailoverConfig, ServerConfig


def timings(**values: float) -> RouterTimings:
    """A router's timings with a short drain, so that a test ends soon."""
    return RouterTimings(**{"drain_s": 0.05, **values})


SHORT_TIMINGS = timings()
PATIENT = {"failover": FailoverConfig(wait_s=120.0)}  # a router's requests wait for workers as long as a test may take


def make_router(
    *workers: StubWorker,
    directory: StubDirectory | None = None,
    timings: RouterTimings = SHORT_TIMINGS,
    tokenizer: ByteTokenizer | None = None,
    placer: Placer | None = None,
    tracing: RouterTracing | None = None,
    **config: Any,
) -> Router:
    """A router of stub workers; `config` are fields of its ServerConfig."""
    values: dict[str, Any] = {"served_model_name": "stub", "failover": FailoverConfig(wait_s=0.05), **config}
    return Router(
        workers=directory or StubDirectory(*workers),
        tokenizer=tokenizer or ByteTokenizer(),  # type: ignore[arg-type]
        config=ServerConfig(**values),
        router_id="r0",
        timings=timings,
        placer=placer,
        tracing=tracing,
        grammar_checker=AnyGrammar(),  # type: ignore[arg-type]
    )


def stream_events(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream that has ended as it should."""
    *lines, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


class StubPeers:
    """Other routers, asked in the same process; an exception stands for one that does not answer."""

    def __init__(self, *others: Router | Exception) -> None:
        self.others = others

    async def ask_others(self, query: Any, *, timeout_s: float) -> list[Any]:
        return [other if isinstance(other, Exception) else query(other) for other in self.others]


@dataclass
class Api:
    """The API in the test's own event loop, without sockets. `worker` is the first of `workers`."""

    workers: tuple[StubWorker, ...]
    directory: StubDirectory
    router: Router
    client: httpx.AsyncClient = field(repr=False)

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3, **body})

    async def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hi"}]
        return await self.client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 3, **body})

    @property
    def worker(self) -> StubWorker:
        return self.workers[0]


@contextlib.asynccontextmanager
async def running(router: Router, num_workers: int) -> AsyncIterator[Router]:
    """The router, once it has the streams of `num_workers` workers; stopped at the end."""
    router.start()
    try:
        await until(lambda: sum(connection.is_open for connection in router.connections.values()) == num_workers)
        yield router
    finally:
        await router.stop()


@contextlib.asynccontextmanager
async def running_api(*workers: StubWorker, **config: Any) -> AsyncIterator[Api]:
    workers = workers or (StubWorker(),)
    directory = StubDirectory(*workers)
    router = make_router(directory=directory, **config)
    transport = httpx.ASGITransport(app=build_api(router), raise_app_exceptions=False)
    async with (
        running(router, sum(worker.can_open for worker in workers)),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        yield Api(workers, directory, router, client)


def num_in_flight(router: Router) -> int:
    """Requests that workers have."""
    return sum(router.state().in_flight_by_worker.values())


def sample(router: Router, name: str, **labels: str) -> float | None:
    """Of the router's own metric `transom_router_{name}`."""
    own = {"model": router.config.served_model_name, "router": router.router_id, **labels}
    return router.metrics.registry.get_sample_value(f"transom_router_{name}", own)


GIVE_UP_S = 120  # what is waited for comes at once, but for a machine that is full


async def until(condition: Callable[[], object]) -> None:
    """Let the event loop run until `condition` holds."""
    async with asyncio.timeout(GIVE_UP_S):
        while not condition():
            await asyncio.sleep(0)


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with running_api() as running:
        yield running


@dataclass
class HttpServer:
    """uvicorn on a thread, with its stub worker; `call` runs something on the server's loop."""

    url: str
    worker: StubWorker
    router: Router
    loop: asyncio.AbstractEventLoop

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(GIVE_UP_S)


@contextlib.contextmanager
def http_server(worker: StubWorker | None = None, **config: Any) -> Iterator[HttpServer]:
    ready = threading.Event()
    made: dict[str, Any] = {}
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # asyncio sends answers at once only if the protocol is named
    listener.bind(("127.0.0.1", 0))

    async def serve() -> None:
        served = worker or StubWorker()
        router = make_router(served, **config)
        server = uvicorn.Server(uvicorn.Config(build_api(router), log_level="critical", ws="none"))
        made.update(worker=served, router=router, server=server, loop=asyncio.get_running_loop())
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not (server.started and router.is_ready) and not task.done():
            await asyncio.sleep(0.005)
        ready.set()
        await task

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(GIVE_UP_S)
    port = listener.getsockname()[1]
    try:
        yield HttpServer(f"http://127.0.0.1:{port}", made["worker"], made["router"], made["loop"])
    finally:
        made["server"].should_exit = True
        thread.join(GIVE_UP_S)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running
