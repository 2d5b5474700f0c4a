"""The workers that there are: a link to each, opened when it appears and drained when it disappears."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from transom_cluster.router.background_tasks import BackgroundTasks
from transom_cluster.router.worker_client import WorkerClient, WorkerDirectory, describe_worker
from transom_cluster.router.worker_connection import LinkListener, WorkerLink
from transom_cluster.telemetry.router_metrics import RouterMetrics

logger = logging.getLogger("transom.router")

FOLLOW_AGAIN_S = 0.5
LAST_WORD_S = 5.0  # a worker that drains answers at once; for one whose host is gone nobody does


def describe_link(link: WorkerLink) -> dict[str, Any]:
    """A worker for people, as JSON values."""
    return {
        "id": link.worker_id,
        "state": link.state,
        "requests": len(link.in_flight),
        "load": None if link.load is None else asdict(link.load),
        **({} if link.info is None else describe_worker(link.info)),
    }


class WorkerPool:
    """Keeps `links` as the directory says. A worker that disappears takes nothing new; what runs there for longer than `drain_s`
    goes on elsewhere."""

    def __init__(
        self,
        directory: WorkerDirectory,
        router_id: str,
        *,
        links: dict[str, WorkerLink],
        listener: LinkListener,
        metrics: RouterMetrics,
        drain_s: float,
    ) -> None:
        self._directory = directory
        self._router_id = router_id
        self._links = links
        self._listener = listener
        self._metrics = metrics
        self._drain_s = drain_s
        self._present: Mapping[str, WorkerClient] = {}
        self._tasks = BackgroundTasks()

    def start(self) -> None:
        """Begin to follow the directory."""
        self._tasks.spawn(self._follow())

    async def stop(self) -> None:
        """Close all links; what is on them is handed over."""
        await self._tasks.cancel()
        await asyncio.gather(*(link.close() for link in self._links.values()))
        self._links.clear()

    async def _follow(self) -> None:
        while True:
            try:
                async for present in self._directory.changes():
                    self._update(present)
            except Exception as error:
                logger.warning("The directory of workers failed: %r", error)
            await asyncio.sleep(FOLLOW_AGAIN_S)

    def _update(self, present: Mapping[str, WorkerClient]) -> None:
        self._present = dict(present)
        for worker_id, client in present.items():
            if worker_id not in self._links:
                self._add(worker_id, client)
        for worker_id, link in self._links.items():
            if worker_id not in present and not link.is_draining:
                link.is_draining = True
                self._tasks.spawn(self._drain(link))

    def _add(self, worker_id: str, client: WorkerClient) -> None:
        link = self._links[worker_id] = WorkerLink(worker_id, client, self._router_id, self._listener)
        link.start()
        logger.info("Worker %s has appeared.", worker_id)

    async def _drain(self, link: WorkerLink) -> None:
        logger.info("Worker %s has disappeared (%d requests).", link.worker_id, len(link.in_flight))
        num_moved = await link.drain(self._drain_s)
        has_drained = link.is_open and await _answers(link)
        await link.close(is_lost=not has_drained)
        if has_drained:
            self._metrics.drained(num_moved=num_moved)
        del self._links[link.worker_id]
        if (client := self._present.get(link.worker_id)) is not None:  # it was missing for a moment only
            self._add(link.worker_id, client)


async def _answers(link: WorkerLink) -> bool:
    """Whether a worker that the directory no longer names is still there.

    Directories hear of deaths as of departures, sometimes before the stream breaks. A worker that is asked to leave stays until its
    routers have closed their streams, so whoever does not answer was lost, and all routers say the same of it.
    """
    try:
        async with asyncio.timeout(LAST_WORD_S):
            await link.client.info()
    except Exception as error:
        logger.warning("Worker %s left without a word: %r", link.worker_id, error)
        return False
    return link.is_open
