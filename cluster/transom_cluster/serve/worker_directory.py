"""`ServeWorkerDirectory` tells a router which worker replicas run now, from `serve.running_replicas` of all worker deployments;
`ServeWorkerClient` calls one of them through a Ray Serve handle.

When a replica's process has ended, Ray's error describes the reason in words and does not give the signal. The client reads one
thing from these words: whether the replica's node is gone.
"""

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Any, cast

from ray.exceptions import RayActorError

from transom_cluster.router.worker_client import WorkerClient
from transom_cluster.serve.running_replicas import running_replicas
from transom_core.contract.worker import MAX_CALL_MESSAGES
from transom_core.errors import LossCause, WorkerLost


class ServeWorkerDirectory:
    """Implements `WorkerDirectory` for worker deployments whose calls go through `ReplicaRequestRouter`. Only the first deployment
    can be scaled to zero, so `wake` starts a replica of the first."""

    def __init__(self, handle: Any, *others: Any) -> None:
        self._handle = handle
        self._handles = (handle, *others)
        self._wake_task: asyncio.Task[None] | None = None

    async def changes(self) -> AsyncGenerator[Mapping[str, WorkerClient], None]:
        """Yield the clients of all running workers by id, at once and again at every change."""
        clients: dict[str, ServeWorkerClient] = {}
        async with contextlib.aclosing(running_replicas(self._handles)) as changes:
            async for present in changes:
                clients = {
                    worker_id: clients.get(worker_id)
                    or ServeWorkerClient(handle, worker_id, replica, is_scaled=handle is self._handle)
                    for worker_id, (handle, replica) in present.items()
                }
                yield cast(dict[str, WorkerClient], dict(clients))

    def wake(self) -> None:
        """Start a worker if there is none: make a call that any replica may take, so that Serve's autoscaler starts one for it."""
        if self._wake_task is None or self._wake_task.done():
            self._wake_task = asyncio.create_task(self._wait_for_any(), context=contextvars.Context())

    async def _wait_for_any(self) -> None:
        with contextlib.suppress(Exception):  # the app is stopping, or the replica died; the router calls `wake` again
            await self._handle.info.remote()


# The calls of `WorkerClient` that return an async generator, and the arguments with which a further call continues the stream.
STREAMS: dict[str, dict[str, bool]] = {"open_stream": {"resumes": True}, "watch_blocks": {}}
NODE_DIED = "its node has died"  # a part of Ray's message about an actor whose host is gone


class ServeWorkerClient:
    """Implements `WorkerClient` for one replica: each call goes to the method of the same name of the worker's `WorkerReplica`.

    The client holds `replica`, Serve's own object for the replica, so that calls reach the worker even while it drains
    (`ReplicaRequestRouter`).
    """

    def __init__(self, handle: Any, worker_id: str, replica: object, *, is_scaled: bool = True) -> None:
        self.is_scaled = is_scaled
        self._handle = handle.options(session_id=worker_id)
        self._streaming = self._handle.options(stream=True)
        self._replica = replica

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Return a function that calls the worker's `method`. Python calls this for attributes that the class does not have."""
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self._stream if method in STREAMS else self._call, method)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method and return its result."""
        return await getattr(self._handle, method).remote(*args, **kwargs)

    async def _stream(self, method: str, *args: Any) -> AsyncGenerator[Any, None]:
        """Yield the messages of a stream, which the worker divides into calls of `MAX_CALL_MESSAGES` messages."""
        resumes: dict[str, bool] = {}
        num_messages = MAX_CALL_MESSAGES
        while num_messages == MAX_CALL_MESSAGES:
            num_messages = 0
            async with contextlib.aclosing(self._iterate(method, *args, **resumes)) as messages:
                async for message in messages:
                    num_messages += 1
                    yield message
            resumes = STREAMS[method]

    async def _iterate(self, method: str, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        """Call a method that returns a stream, and yield its messages. Ending the iteration cancels the call at the worker.

        Raises:
            WorkerLost: the worker's process ended.
        """
        response = getattr(self._streaming, method).remote(*args, **kwargs)
        try:
            async for message in response:
                yield message
        except RayActorError as error:
            raise WorkerLost(f"The worker's process has ended: {error}", loss_cause=_loss_cause(error)) from error
        finally:
            response.cancel()


def _loss_cause(error: RayActorError) -> LossCause:
    return "host_lost" if error.preempted or NODE_DIED in " ".join(str(error).split()) else "unknown"
