"""A router over a stub worker, with a real HTTP server on a random loopback port."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.cluster.asgi_call import AsgiCall
from tests.cluster.stub_worker import AnyGrammar, ByteTokenizer, StubDirectory, StubWorker
from tests.loopback_server import served
from transom_cluster.http.api import build_api
from transom_cluster.router.peers import RouterPeers
from transom_cluster.router.router import Router
from transom_cluster.router.timings import RouterTimings
from transom_cluster.routing.placer import Placer
from transom_cluster.telemetry.router_tracing import RouterTracing
from transom_core.config import AutoscalingConfig, FailoverConfig, ServerConfig
from transom_core.settings.settings import Settings


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
    autoscaling: AutoscalingConfig | None = None,
    router_id: str = "r0",
    peers: RouterPeers | None = None,
    **config: Any,
) -> Router:
    """A router of stub workers; `config` are fields of its ServerConfig."""
    values: dict[str, Any] = {"served_model_name": "stub", "failover": FailoverConfig(wait_s=0.05), **config}
    return Router(
        workers=directory or StubDirectory(*workers),
        tokenizer=tokenizer or ByteTokenizer(),  # type: ignore[arg-type]
        config=ServerConfig(**values),
        router_id=router_id,
        timings=timings,
        peers=peers,
        placer=placer,
        tracing=tracing,
        autoscaling=autoscaling,
        grammar_checker=AnyGrammar(),  # type: ignore[arg-type]
    )


def stream_events(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream that has ended as it should."""
    assert text.endswith("\n\ndata: [DONE]\n\n")
    return sent_events(text)


def sent_events(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream, whole or not."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


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
    app: Any = field(repr=False)

    def call(self, path: str, body: Mapping[str, Any], **options: Any) -> AsgiCall:
        """A request whose client the test plays."""
        return AsgiCall(self.app, path, body, **options)

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
    app = build_api(router)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        running(router, sum(worker.can_open for worker in workers)),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        yield Api(workers, directory, router, client, app)


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
def served_settings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Settings, dict[str, Any]]]:
    """What `transom serve` would start: (settings, given values)."""
    calls: list[tuple[Settings, dict[str, Any]]] = []

    def run(settings: Settings, given: dict[str, Any]) -> int:
        calls.append((settings, given))
        return 0

    monkeypatch.setattr("transom_cluster.commands.serve.run_server", run)
    return calls


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's start fails the test."""
    monkeypatch.setattr("transom_cluster.commands.local_ray.LocalRay.start", lambda *_: pytest.fail("Ray was started."))


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
    made = worker or StubWorker()
    router = make_router(made, **config)
    with served(build_api(router), lambda: router.is_ready) as (port, loop):
        yield HttpServer(f"http://127.0.0.1:{port}", made, router, loop)


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running
