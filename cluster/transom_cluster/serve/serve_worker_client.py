"""`ServeWorkerClient`: calls one worker replica through a Ray Serve handle.

When a replica's process has ended, Ray's error describes the reason in words and does not give the signal. This module reads only
from it whether the replica's node is gone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from ray.exceptions import RayActorError

from transom_core.errors import LossCause, WorkerLost

STREAMS = ("open_stream", "watch_blocks")  # the calls of `WorkerClient` that return an async generator
NODE_DIED = "its node has died"  # a part of Ray's message about an actor whose host is gone


class ServeWorkerClient:
    """Implements `WorkerClient` for one replica: each call goes to the method of the same name of the worker's `WorkerReplica`.

    The client holds `replica`, Serve's own object for the replica, so that calls reach the worker even while it drains
    (`ReplicaRequestRouter`).
    """

    def __init__(self, handle: Any, worker_id: str, replica: object) -> None:
        self._handle = handle.options(session_id=worker_id)
        self._streaming = self._handle.options(stream=True)
        self._replica = replica

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Return a function that calls the worker's `method`. Python calls this for attributes that the class does not have."""
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self._iterate if method in STREAMS else self._call, method)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method and return its result."""
        return await getattr(self._handle, method).remote(*args, **kwargs)

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
