"""Queries to the other routers through Ray Serve, some of which fail or are late."""

import asyncio
import pickle
from functools import partial
from typing import Any

import pytest

from tests.cluster.conftest import make_router
from tests.cluster.stub_worker import StubWorker
from transom_cluster.router import peers
from transom_cluster.router.peers import NoPeers, metrics_page, process_name
from transom_cluster.serve.router_peers import ServeRouterPeers, answer_peer


class StubHandle:
    """A deployment whose replicas answer so; None for one that never does."""

    def __init__(self, *answers: Any) -> None:
        self.answers = answers
        self.asked: list[Any] = []

    def broadcast(self, method: str, *args: Any) -> Any:
        self.asked.append((method, *args))
        return self

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        if None in self.answers:
            await asyncio.sleep(timeout_s)
            raise TimeoutError
        return list(self.answers)


async def test_others_answer_and_the_own_answer_is_dropped() -> None:
    handle = StubHandle(("a", "page of a"), ("me", None), ("b", "page of b"))
    others = ServeRouterPeers("me", lambda: handle)
    query = partial(metrics_page, openmetrics=True)
    assert await others.ask_others(query, timeout_s=120) == ["page of a", "page of b"]
    assert handle.asked == [("answer_peer", "me", query)]


async def test_a_router_that_fails_costs_its_own_answer() -> None:
    died = ConnectionError("died")
    others = ServeRouterPeers("me", lambda: StubHandle(("a", "1"), died, ("me", None)))
    assert await others.ask_others(process_name, timeout_s=120) == ["1", died]


async def test_a_router_that_is_late_ends_the_query_in_time() -> None:
    others = ServeRouterPeers("me", lambda: StubHandle(None, ("me", None)))
    (late,) = await others.ask_others(process_name, timeout_s=0.02)
    assert isinstance(late, TimeoutError)


async def test_no_router_is_asked_where_serve_knows_none() -> None:
    def nothing() -> Any:
        raise KeyError("no such deployment")

    assert await ServeRouterPeers("me", nothing).ask_others(process_name, timeout_s=120) == []
    assert await NoPeers().ask_others(process_name, timeout_s=120) == []


async def test_a_router_answers_others_but_not_itself() -> None:
    router = make_router(StubWorker())
    assert answer_peer(router, "other", process_name) == ("r0", "router/r0")
    assert answer_peer(router, "r0", process_name) == ("r0", None)


@pytest.mark.parametrize(
    "query",
    [
        partial(metrics_page, openmetrics=True),
        process_name,
        partial(peers.process_metrics_page, process="router/r0", openmetrics=False),
        partial(peers.request_timeline, request_id="a", client="all"),
        partial(peers.recent_requests, client="all", state=None, limit=5),
    ],
)
async def test_queries_and_their_answers_travel_between_processes(query: Any) -> None:
    router = make_router(StubWorker())
    sent = pickle.loads(pickle.dumps(query))
    assert type(pickle.loads(pickle.dumps(sent(router)))) is type(query(router))
