"""Workers with real engines in this process: their calls to each other, requests to one of them, and a router of workers that are
lost after a number of output events."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from functools import partialmethod
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import running
from tests.cluster.stub_worker import StubDirectory
from tests.thread_ranks import ThreadRanks
from transom_cluster.router.router import Router
from transom_cluster.router.timings import RouterTimings
from transom_cluster.telemetry.router_tracing import RouterTracing
from transom_core.config import FailoverConfig, ServerConfig
from transom_core.contract import ErrorInfo, PrefixSource, Request, SamplingParams, WindowPolicy, WorkerMessage
from transom_core.model_files.resolve import resolve_model
from transom_core.settings.settings import Settings
from transom_core.text.tokenizer import Tokenizer
from transom_worker.engine.startup import build_engine
from transom_worker.replica import WorkerReplica

PROMPT = tuple(range(5, 405))
HIT = 384  # of PROMPT: whole blocks, and a token left to compute
WIRES = [  # how blocks move between workers
    "ray",
    pytest.param("nixl", marks=pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is not installed")),
]
HYBRID: dict[str, Any] = {"window": 40, "window_pattern": "SF", "sinks": 4}


class LocalPeers:
    """The workers of this process by the routers' ids."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerReplica] = {}

    def start(self, model: Path, *, num_ranks: int | None = None, **settings: Any) -> WorkerReplica:
        """Start one more worker: w0, w1, ... Its ranks are threads if their number is given."""
        name = f"w{len(self.workers)}"
        defaults: dict[str, Any] = {
            "kv_cache_memory_bytes": "8MiB",
            "swap_space": "8MiB",
            "max_num_seqs": 8,
            "kv_transfer_wire": "ray",
            "kv_transfer_timeout_s": 60,  # NIXL connects in seconds on a busy machine
            "dtype": "float32",
            "device": "cpu",
        }
        config = Settings.parse(model=str(model), **{**defaults, **settings}).engine_config()
        engine = None
        if num_ranks is not None:
            engine = build_engine(config, model_name="tiny", worker=name, executor=ThreadRanks(config, num_ranks))
        replica = self.workers[name] = WorkerReplica(config, "tiny", name, engine=engine, peers=self)
        # so that this machine's speed does not decide what is loaded and what computed
        replica.engine.scheduler._rates = None
        return replica

    async def _call(self, call: str, worker: str, *args: Any) -> Any:
        return await getattr(self.workers[worker], call)(*args)

    open_export = partialmethod(_call, "open_export")
    own_query = partialmethod(_call, "own_query")
    fetch_early = partialmethod(_call, "fetch_early")
    read_export = partialmethod(_call, "read_export")
    close_export = partialmethod(_call, "close_export")


def evict_all(*replicas: WorkerReplica) -> None:
    for replica in replicas:
        replica._thread.call(replica.engine.scheduler.cache.evict_all).result()


def request(
    name: str,
    source: str | None = None,
    *,
    prompt: tuple[int, ...] = PROMPT,
    policy: WindowPolicy | None = None,
    **params: Any,
) -> Request:
    """A request whose worker shall fetch the prompt's prefix from `source`."""
    fetch = None if source is None else PrefixSource(worker=source, num_tokens=HIT)
    sampling = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "temperature": 0.0, **params})
    return Request(
        request_id=name, prompt_token_ids=prompt, params=sampling, seed=1, prefix_source=fetch, kv_policy=policy
    )


async def at_worker(replica: WorkerReplica, request: Request) -> tuple[list[int], Any]:
    """The tokens of one request that a worker gets without a router, and its usage."""
    tokens: list[int] = []
    usage = None
    stream = replica.open_stream("direct")
    await anext(stream)
    assert await replica.submit("direct", [request]) == [None]
    async with contextlib.aclosing(stream):
        async for message in stream:
            for event in message.events:
                assert event.error is None
                tokens += event.token_ids
                usage = event.usage or usage
                if event.finish_reason is not None or event.is_handover:
                    return tokens, usage
    raise AssertionError("the stream has ended")


def fetch_of(replica: WorkerReplica, request_id: str) -> dict[str, Any]:
    """How a request's fetch ended at its worker."""
    [told] = [one for one in replica.engine.timelines.events_of(request_id) if one["what"] == "prefix_fetched"]
    return told


class Mortal:
    """A worker that is gone once the router has read `num_events` of its requests; None: it stays.

    They are counted one by one, since a router that reads slowly gets many of them in one message.
    """

    def __init__(self, replica: WorkerReplica) -> None:
        self._replica = replica
        self.worker = ""
        self.num_events: int | None = None
        self.is_dead = False

    def __getattr__(self, call: str) -> Any:
        return getattr(self._replica, call)

    async def open_stream(self, router_id: str) -> AsyncGenerator[WorkerMessage, None]:
        self.check()
        async with contextlib.aclosing(self._replica.open_stream(router_id)) as stream:
            async for message in stream:
                self.check()
                if self.num_events is None or len(message.events) <= self.num_events:
                    yield message
                else:
                    yield replace(message, events=message.events[: self.num_events])
                    self.is_dead = True
                self.check()
                if self.num_events is not None:
                    self.num_events -= len(message.events)

    async def submit(self, router_id: str, requests: list[Request]) -> list[ErrorInfo | None]:
        self.check()
        return await self._replica.submit(router_id, requests)

    async def info(self) -> Any:
        self.check()
        return await self._replica.info()

    def check(self) -> None:
        if self.is_dead:
            raise ConnectionError("the worker is gone")


@contextlib.asynccontextmanager
async def routed(
    model: Path, *workers: Mortal, tracing: RouterTracing | None = None, **config: Any
) -> AsyncIterator[Router]:
    """A router of these workers (w0, w1, ...), which places requests in turn unless `config`, fields of its ServerConfig, says
    otherwise."""
    for number, worker in enumerate(workers):
        worker.worker = f"w{number}"
    router = Router(
        workers=StubDirectory(*workers),  # type: ignore[arg-type]
        tokenizer=Tokenizer.load(resolve_model(str(model))),
        config=ServerConfig(
            served_model_name="tiny",
            failover=FailoverConfig(wait_s=120.0),
            **{"routing_policy": "round_robin", **config},
        ),
        router_id="r",
        timings=RouterTimings(drain_s=0.0),
        tracing=tracing,
    )
    async with running(router, len(workers)):
        yield router


async def answers_of(router: Router, requests: list[Request]) -> list[list[int]]:
    """The tokens of each request, which come in order, once, and without an error."""
    answers: list[list[int]] = [[] for _ in requests]
    async with router.generate(requests) as output:
        while output.num_unfinished:
            for index, event in await output.next():
                assert event.error is None
                assert event.position == len(answers[index])
                answers[index] += event.token_ids
    return answers
