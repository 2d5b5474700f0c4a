"""`RunningReplicas`: which worker replicas of a deployment run, as Ray Serve's controller reports them to this process.

Serve's request router (`serve.replica_router`) publishes them on Serve's event loop, and the router reads them on its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Mapping
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
    def subscribed(self, changed: asyncio.Event | None = None) -> Iterator[asyncio.Event]:
        """Provide an event that is set at every change, on the caller's event loop: `changed`, or a new one if that is None."""
        changed = changed or asyncio.Event()
        with self._lock:
            self._subscribers[changed] = asyncio.get_running_loop()
        try:
            yield changed
        finally:
            with self._lock:
                del self._subscribers[changed]


_by_deployment: dict[tuple[str, str], RunningReplicas] = {}
_by_deployment_lock = threading.Lock()


def running_replicas_of(deployment: str, app: str) -> RunningReplicas:
    """Return this process's `RunningReplicas` of a deployment, which the publisher and all readers share."""
    with _by_deployment_lock:
        return _by_deployment.setdefault((deployment, app), RunningReplicas())
