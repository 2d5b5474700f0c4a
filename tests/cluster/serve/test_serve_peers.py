"""Queries to the other routers through Ray Serve: the private names that they rely on, and routers that fail or are late."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import warnings
from typing import Any

import pytest

from tests.cluster.conftest import make_router
from tests.cluster.stub_worker import StubWorker
from transom_cluster.router.peers import (
    MetricsQuery,
    NoPeers,
    ProcessMetricsQuery,
    ProcessNameQuery,
    RecentRequestsQuery,
    TimelineQuery,
)
from transom_cluster.serve.router_peers import ServeRouterPeers, answer_peer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, of pydantic
    from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle


class StubCall:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def get_async(self) -> Any:
        if self._answer is None:
            await asyncio.Event().wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class StubHandle:
    """A deployment whose replicas answer so; None for one that never does."""

    def __init__(self, *answers: Any) -> None:
        self.answers = answers
        self.asked: list[Any] = []

    def broadcast(self, method: str, *args: Any) -> Any:
        self.asked.append((method, *args))
        return self

    async def _fetch_replica_results_async(self) -> list[StubCall]:
        return [StubCall(answer) for answer in self.answers]


async def test_others_answer_and_the_own_answer_is_dropped() -> None:
    handle = StubHandle(("a", "page of a"), ("me", None), ("b", "page of b"))
    peers = ServeRouterPeers("me", lambda: handle)
    assert await peers.ask_others(MetricsQuery(True), timeout_s=120) == ["page of a", "page of b"]
    assert handle.asked == [("answer_peer", "me", MetricsQuery(True))]


async def test_a_router_that_fails_or_is_late_costs_only_its_own_answer() -> None:
    died = ConnectionError("died")
    handle = StubHandle(("me", None))
    peers = ServeRouterPeers("me", lambda: handle)
    assert (
        await peers.ask_others(ProcessNameQuery(), timeout_s=120) == []
    )  # it has the handle: only a late answer takes time
    handle.answers = (None, ("a", "1"), died, ("me", None))
    late, answer, lost = await peers.ask_others(ProcessNameQuery(), timeout_s=0.02)
    assert isinstance(late, TimeoutError)
    assert (answer, lost) == ("1", died)


async def test_no_router_is_asked_where_serve_knows_none() -> None:
    def nothing() -> Any:
        raise KeyError("no such deployment")

    assert await ServeRouterPeers("me", nothing).ask_others(ProcessNameQuery(), timeout_s=120) == []
    assert await NoPeers().ask_others(ProcessNameQuery(), timeout_s=120) == []


async def test_a_router_answers_others_but_not_itself() -> None:
    router = make_router(StubWorker())
    assert answer_peer(router, "other", ProcessNameQuery()) == ("r0", "router/r0")
    assert answer_peer(router, "r0", ProcessNameQuery()) == ("r0", None)


@pytest.mark.parametrize(
    "query",
    [
        MetricsQuery(True),
        ProcessNameQuery(),
        ProcessMetricsQuery("router/r0", False),
        TimelineQuery("a", "all"),
        RecentRequestsQuery("all", None, 5),
    ],
)
async def test_queries_and_their_answers_travel_between_processes(query: Any) -> None:
    router = make_router(StubWorker())
    sent = pickle.loads(pickle.dumps(query))
    assert sent == query
    assert type(pickle.loads(pickle.dumps(sent.answer(router)))) is type(query.answer(router))


def test_serve_has_what_is_relied_on() -> None:
    assert list(inspect.signature(DeploymentHandle.broadcast).parameters)[:3] == ["self", "method_name", "args"]
    assert inspect.iscoroutinefunction(DeploymentBroadcastResponse._fetch_replica_results_async)
