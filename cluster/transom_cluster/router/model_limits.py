"""What the served model can do, as far as a worker has said so yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from transom_cluster.openai.to_contract import ModelLimits
from transom_cluster.router.worker_connection import WorkerConnection
from transom_worker.errors import WorkerLost

NO_WORKER = "No worker could take the request for {wait_s:.0f} s (starting, or being replaced); try again in a moment."


class ModelLimitsTracker:
    """The least of all workers' limits at the time when the last one was opened; they stay known while there is none."""

    def __init__(self) -> None:
        self.now: ModelLimits | None = None
        self._are_known = asyncio.Event()

    def update(self, connections: Iterable[WorkerConnection]) -> None:
        """A worker's connection was opened."""
        known = [
            connection.limits
            for connection in connections
            if connection.takes_requests and connection.limits is not None
        ]
        self.now = min(known, key=lambda limits: limits.max_model_len, default=self.now)
        if self.now is not None:
            self._are_known.set()

    async def wait(self, wait_s: float, *, wake_workers: Callable[[], None]) -> None:
        """Wait until they are known; returns at once if they are.

        Raises:
            WorkerLost: there was no worker for `wait_s`.
        """
        if self.now is not None:
            return
        wake_workers()
        try:
            await asyncio.wait_for(self._are_known.wait(), wait_s)
        except TimeoutError:
            raise WorkerLost(NO_WORKER.format(wait_s=wait_s)) from None
