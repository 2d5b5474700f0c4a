"""The worker directory, and calls to the worker that they name, through Serve's hooks without a running Serve. Queries to the other
routers through Ray Serve, some of which fail or are late."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import pickle
import warnings
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any

import pytest

from tests.cluster.conftest import make_router
from tests.cluster.stub_worker import StubWorker
from transom_cluster.router import peers
from transom_cluster.router.peers import NoPeers, metrics_page, process_name
from transom_cluster.serve.router_peers import ServeRouterPeers, answer_peer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, of pydantic
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
    from ray.serve.request_router import PendingRequest

    from transom_cluster.serve.replica_router import ReplicaRequestRouter

from transom_cluster.router.worker_client import WorkerClient
from transom_cluster.serve.running_replicas import running_replicas_of
from transom_cluster.serve.worker_directory import STREAMS, ServeWorkerClient, ServeWorkerDirectory
from transom_core.errors import WorkerLost
from transom_worker.replica import WorkerReplica


def test_every_call_of_a_router_is_a_method_of_the_worker() -> None:
    calls = {name: call for name, call in vars(WorkerClient).items() if not name.startswith("_")}
    for name, call in calls.items():
        method = getattr(WorkerReplica, name)
        own = STREAMS.get(name, {})  # from `ServeWorkerClient` itself
        assert inspect.signature(method).parameters.keys() == {*inspect.signature(call).parameters, *own}
        assert inspect.isasyncgenfunction(method) is (name in STREAMS)


class Replica:
    """Stands for Serve's RunningReplica."""

    def __init__(self, deployment: DeploymentID, name: str) -> None:
        self.replica_id = ReplicaID(name, deployment)
        self.max_ongoing_requests = 10

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


_NUMBERS = itertools.count()


class Handle:
    """Stands for Serve's DeploymentHandle; `options` say what a client would call with."""

    def __init__(self, deployment: DeploymentID, **options: object) -> None:
        self.deployment_name, self.app_name = deployment.name, deployment.app_name
        self.given = options

    def options(self, **options: object) -> Handle:
        return Handle(DeploymentID(self.deployment_name, self.app_name), **{**self.given, **options})


@pytest.fixture
def deployment(request: pytest.FixtureRequest) -> DeploymentID:
    return DeploymentID(request.node.name, "app")


@pytest.fixture
async def router(deployment: DeploymentID) -> ReplicaRequestRouter:
    router = ReplicaRequestRouter(deployment_id=deployment, handle_source=DeploymentHandleSource.REPLICA)
    router.initialize_state()
    return router


async def choose(router: ReplicaRequestRouter, worker_id: str, *, is_retry: bool = False) -> Any:
    """The replica for a call to a worker, by the method that Ray Serve calls, which has no public name."""
    metadata = RequestMetadata(request_id="r", internal_request_id=str(next(_NUMBERS)), session_id=worker_id)
    request = PendingRequest(args=[], kwargs={}, metadata=metadata)
    return await router._choose_replica_for_request(request, is_retry=is_retry)


class Calls:
    """Stands for the handle of a worker whose streams have these numbers of messages, one for each call."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = list(lengths)
        self.made: list[tuple[tuple[object, ...], dict[str, object]]] = []
        self.open_stream = self.watch_blocks = self

    def options(self, **_: object) -> Calls:
        return self

    def remote(self, *args: object, **kwargs: object) -> Calls:
        self.made.append((args, kwargs))
        return self

    async def __aiter__(self) -> AsyncGenerator[int, None]:
        for message in range(self.lengths.pop(0)):
            yield message

    def cancel(self) -> None:
        pass


async def test_a_stream_goes_on_with_the_next_call_when_the_worker_has_ended_a_full_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transom_cluster.serve.worker_directory.MAX_CALL_MESSAGES", 3)
    calls = Calls(3, 3, 2)
    client = ServeWorkerClient(calls, "w", object())
    assert [message async for message in client.open_stream("r")] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert calls.made == [(("r",), {}), (("r",), {"resumes": True}), (("r",), {"resumes": True})]
    calls = Calls(3, 0)
    client = ServeWorkerClient(calls, "w", object())
    assert [message async for message in client.watch_blocks("r", 0.1)] == [0, 1, 2]
    assert calls.made == [(("r", 0.1), {})] * 2


async def test_calls_go_to_the_replica_they_name(router: ReplicaRequestRouter, deployment: DeploymentID) -> None:
    one, two = Replica(deployment, "one"), Replica(deployment, "two")
    router.update_replicas([one, two])
    assert await choose(router, "two") is two
    assert await choose(router, "one") is one
    assert await choose(router, "") in (one, two)
    with pytest.raises(WorkerLost, match="three"):
        await choose(router, "three")


async def test_a_draining_replica_is_reached_as_long_as_it_is_held(
    router: ReplicaRequestRouter, deployment: DeploymentID
) -> None:
    one, two = Replica(deployment, "one"), Replica(deployment, "two")
    router.update_replicas([one, two])
    router.update_replicas([two])
    await asyncio.sleep(0)  # Serve's own look at the queues of new replicas
    assert await choose(router, "one") is one
    with pytest.raises(WorkerLost):  # it did not take the call, and no other may have it
        await choose(router, "one", is_retry=True)
    router.on_replica_actor_died(one.replica_id)
    with pytest.raises(WorkerLost):
        await choose(router, "one")
    assert list(running_replicas_of(deployment.name, "app").replicas) == ["two"]


async def test_a_call_without_a_worker_waits_for_the_first(
    router: ReplicaRequestRouter, deployment: DeploymentID
) -> None:
    waiting = asyncio.create_task(choose(router, ""))
    await asyncio.sleep(0)
    one = Replica(deployment, "one")
    router.update_replicas([one])
    assert await asyncio.wait_for(waiting, 120) is one


async def test_the_directory_tells_every_change_and_keeps_clients(deployment: DeploymentID) -> None:
    running = running_replicas_of(deployment.name, "app")
    changes: AsyncGenerator[Mapping[str, Any], None] = ServeWorkerDirectory(Handle(deployment)).changes()
    assert await anext(changes) == {}
    one, two = Replica(deployment, "one"), Replica(deployment, "two")
    await asyncio.to_thread(running.publish, {"one": one})
    first = await asyncio.wait_for(anext(changes), 120)
    assert first["one"]._handle.given == {"session_id": "one"}
    running.publish({"one": one})  # nothing new: no event
    running.publish({"one": one, "two": two})
    second = await asyncio.wait_for(anext(changes), 120)
    assert second["one"] is first["one"]
    assert list(second) == ["one", "two"]
    running.publish({"two": two})
    assert list(await asyncio.wait_for(anext(changes), 120)) == ["two"]
    await changes.aclose()
    running.publish({})  # without subscribers


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


async def test_others_answer_one_that_fails_costs_its_own_answer_and_the_own_answer_is_dropped() -> None:
    died = ConnectionError("died")
    handle = StubHandle(("a", "page of a"), died, ("me", None), ("b", "page of b"))
    others = ServeRouterPeers("me", lambda: handle)
    query = partial(metrics_page, openmetrics=True)
    assert await others.ask_others(query, timeout_s=120) == ["page of a", died, "page of b"]
    assert handle.asked == [("answer_peer", "me", query)]


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
