"""`RunningReplicas`: which worker replicas of a deployment run, as Ray Serve's controller reports them to this process.

Serve's request router (`serve.replica_router`) publishes them on Serve's event loop. Routers and workers read them on their own
(`running_replicas`).
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any


class RunningReplicas:
    """The running replicas of one deployment, by worker id. One thread publishes them; event loops of other threads read them."""

    def __init__(self) -> None:
        self.replicas: Mapping[str, Any] = {}
        self._lock = threading.Lock()
        self._subscribers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def publish(self, replicas: Mapping[str, Any]) -> None:
        """Replace the running replicas and wake the subscribers. Any thread may call this."""
        with self._lock:
            if replicas.keys() == self.replicas.keys():
                return
            self.replicas = replicas
            for changed, loop in self._subscribers.items():
                if not loop.is_closed():
                    loop.call_soon_threadsafe(changed.set)

    @contextlib.contextmanager
    def subscribed(self, changed: asyncio.Event) -> Iterator[None]:
        """Set an event of the caller's event loop at every change."""
        with self._lock:
            self._subscribers[changed] = asyncio.get_running_loop()
        try:
            yield
        finally:
            with self._lock:
                del self._subscribers[changed]


_by_deployment: dict[tuple[str, str], RunningReplicas] = {}
_by_deployment_lock = threading.Lock()


def running_replicas_of(deployment: str, app: str) -> RunningReplicas:
    """Return this process's `RunningReplicas` of a deployment, which the publisher and all readers share."""
    with _by_deployment_lock:
        return _by_deployment.setdefault((deployment, app), RunningReplicas())


async def running_replicas(handles: Sequence[Any]) -> AsyncGenerator[dict[str, tuple[Any, Any]], None]:
    """Yield the running replicas of some deployments at once and again at every change: worker id -> (the handle of the replica's
    deployment, the replica)."""
    changed = asyncio.Event()
    sources = []
    for handle in handles:
        handle.options(method_name="info")  # makes Serve start to report replicas to this process
        sources.append((handle, running_replicas_of(handle.deployment_name, handle.app_name)))
    with contextlib.ExitStack() as subscriptions:
        for _, running in sources:
            subscriptions.enter_context(running.subscribed(changed))
        while True:
            changed.clear()
            yield {name: (handle, one) for handle, running in sources for name, one in running.replicas.items()}
            await changed.wait()
