"""Asking the other routers through Ray Serve: what is relied on, and what becomes of those that fail or are late."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from typing import Any

import pytest
from stub_worker import StubWorker

from conftest import make_router
from transom_cluster.router.peers import NoPeers, answer_peer
from transom_cluster.serve.router_peers import ServeRouterPeers

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
    assert await peers.ask_others("metrics_text", True, timeout_s=120) == ["page of a", "page of b"]
    assert handle.asked == [("answer_peer", "me", "metrics_text", (True,))]


async def test_one_that_fails_or_is_late_costs_only_its_own_answer() -> None:
    died = ConnectionError("died")
    peers = ServeRouterPeers("me", lambda: None)
    peers._handle = StubHandle(None, ("a", 1), died, ("me", None))  # so that only the one that is late takes time
    late, answer, lost = await peers.ask_others("process_name", timeout_s=0.02)
    assert isinstance(late, TimeoutError)
    assert (answer, lost) == (1, died)


async def test_nobody_is_asked_where_serve_knows_nobody() -> None:
    def nothing() -> Any:
        raise KeyError("no such deployment")

    assert await ServeRouterPeers("me", nothing).ask_others("process_name", timeout_s=120) == []
    assert await NoPeers().ask_others("process_name", timeout_s=120) == []


async def test_routers_answer_what_is_allowed_and_themselves_nothing() -> None:
    router = make_router(StubWorker())
    assert await answer_peer(router, "other", "process_name", ()) == ("r0", "router/r0")
    assert await answer_peer(router, "r0", "process_name", ()) == ("r0", None)
    for method in ("stop", "__class__", "begin_drain"):
        with pytest.raises(ValueError, match="do not ask each other"):
            await answer_peer(router, "other", method, ())


def test_serve_has_what_is_relied_on() -> None:
    assert list(inspect.signature(DeploymentHandle.broadcast).parameters)[:3] == ["self", "method_name", "args"]
    assert inspect.iscoroutinefunction(DeploymentBroadcastResponse._fetch_replica_results_async)
