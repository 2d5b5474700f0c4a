"""`ModelLimitsTracker`: keeps the served model's limits. Workers report them when they connect, and requests wait until then."""

import asyncio
from collections.abc import Callable, Iterable

from transom_cluster.openai.request.request_limits import ModelLimits
from transom_core.errors import EngineDead, WorkerLost

NO_WORKER = "No worker could take the request for {wait_s:.0f} s (starting, or being replaced); try again in a moment."

_NOT_READY = "The worker is not ready (starting, or being replaced); try again in a moment."


class ModelLimitsTracker:
    """Keeps the limits of the worker with the shortest `max_model_len`, as of the last time that a worker connected.

    The limits stay known while no worker is connected. `wake_workers` asks for a worker if autoscaling has stopped all of them.
    """

    def __init__(self, *, wake_workers: Callable[[], None]) -> None:
        self.last_known: ModelLimits | None = None
        self._wake_workers = wake_workers
        self._are_known = asyncio.Event()

    @property
    def current(self) -> ModelLimits:
        """Return the limits that were reported last.

        Raises:
            EngineDead: no worker has connected so far.
        """
        if self.last_known is None:
            raise EngineDead(_NOT_READY)
        return self.last_known

    def update(self, connected: Iterable[ModelLimits]) -> None:
        """Update the limits when a worker has connected; `connected` has those of all workers that take requests now."""
        self.last_known = min(connected, key=lambda limits: limits.max_model_len, default=self.last_known)
        if self.last_known is not None:
            self._are_known.set()

    async def wait(self, wait_s: float) -> None:
        """Wait until the limits are known.

        Raises:
            WorkerLost: no worker connected within `wait_s`.
        """
        if self.last_known is not None:
            return
        self._wake_workers()
        try:
            await asyncio.wait_for(self._are_known.wait(), wait_s)
        except TimeoutError:
            raise WorkerLost(NO_WORKER.format(wait_s=wait_s)) from None
