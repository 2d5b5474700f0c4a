"""The whole path but Ray: uvicorn on a thread, a router, and a worker with a tiny real engine in the same process."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.cluster.stub_worker import StubDirectory
from tests.hooked_executor import HookedExecutor
from tests.loopback_server import served
from transom_cluster.http.api import build_api
from transom_cluster.router.router import Router
from transom_cluster.router.timings import RouterTimings
from transom_cluster.telemetry.router_tracing import RouterTracing
from transom_core.config import ServerConfig
from transom_core.model_files.resolve import resolve_model
from transom_core.settings.settings import Settings
from transom_core.text.tokenizer import Tokenizer
from transom_worker.engine import router_outbox
from transom_worker.engine.startup import build_engine
from transom_worker.replica import WorkerReplica
from transom_worker.telemetry.engine_timelines import Clock

QUIET_S = 120
SILENCE_S = 3600.0  # a process that stands still for a minute, and all in it, takes neither router nor worker for lost


@dataclass
class EngineServer:
    """A running server and what is behind it."""

    port: int
    router: Router
    replica: WorkerReplica
    executor: HookedExecutor

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def left(self) -> dict[str, int]:
        """What of requests is still there, anywhere."""
        counts = {
            "waiting at the router": len(self.router.queue),
            "in flight at the router": sum(self.router.state().in_flight_by_worker.values()),
            "known to the worker": self.replica.num_requests,
            "known to the engine": len(self.replica.engine.requests),
            "active blocks": sum(group.active_blocks for group in self.replica.engine.scheduler.stats().groups),
        }
        return {name: count for name, count in counts.items() if count}

    async def until_quiet(self) -> None:
        """Wait until no request is left."""
        try:
            async with asyncio.timeout(QUIET_S):
                while self.left():
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"left over: {self.left()}") from None


@contextlib.contextmanager
def engine_server(
    model: Path | str,
    *,
    server: Mapping[str, Any] | None = None,
    wrap: Callable[[Any], Any] = lambda api: api,
    tracing: RouterTracing | None = None,
    clock: Clock = time.time,
    **settings: Any,
) -> Iterator[EngineServer]:
    """A server of `model`; `server` are fields of its ServerConfig, `wrap` puts a middleware around its API, and `clock` is the
    engine's."""
    engine_config = Settings.parse(model=str(model), **settings).engine_config()
    executor = HookedExecutor(engine_config)
    engine = build_engine(engine_config, model_name="tiny", executor=executor, clock=clock)
    replica = WorkerReplica(engine_config, "tiny", engine=engine)
    tokenizer = Tokenizer.load(resolve_model(str(model)))
    config = ServerConfig(served_model_name="tiny", **(server or {}))
    directory = StubDirectory()
    directory.workers["0"] = replica  # type: ignore[assignment]
    router = Router(
        workers=directory,
        tokenizer=tokenizer,
        config=config,
        router_id="r",
        timings=RouterTimings(drain_s=0.1, silence_s=SILENCE_S),
        tracing=tracing,
    )
    try:
        # no connection may be closed just as a client that was kept from its core sends the next request
        with (
            mock.patch.object(router_outbox, "SILENT_ROUTER_S", SILENCE_S),
            served(wrap(build_api(router)), lambda: router.is_ready, timeout_keep_alive=QUIET_S) as (port, _),
        ):
            yield EngineServer(port, router, replica, executor)
    finally:
        replica.shutdown()
