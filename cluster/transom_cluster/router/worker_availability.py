"""Which workers may take a request just now: open ones that do not rest, and of suspects one each (docs/failover.md)."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from transom_cluster.router.in_flight_requests import InFlightRequest
from transom_cluster.router.worker_connection import WorkerConnection

REST_S = 1.0  # for which a worker that could not take a request gets none, if others are there


class WillingWorkers:
    """What one router's request queue knows of its workers beside their connections."""

    def __init__(self, connections: Mapping[str, WorkerConnection]) -> None:
        self._connections = connections
        self._examined: dict[str, InFlightRequest] = {}  # the suspect that each worker has
        self._rests_until_s: dict[str, float] = {}  # workers that said they cannot take requests just now

    def open_ids(self) -> list[str]:
        """Workers that take requests; those that rest only if there are no others."""
        open_ids = [one for one, connection in self._connections.items() if connection.takes_requests]
        now_s = time.monotonic()
        return [one for one in open_ids if self._rests_until_s.get(one, 0.0) <= now_s] or open_ids

    def without_suspect(self, worker_ids: Collection[str]) -> list[str]:
        """Those that may take one."""
        return [one for one in worker_ids if one not in self._examined]

    def examine(self, request: InFlightRequest, worker_id: str) -> None:
        """The worker has this suspect, and takes no other."""
        self._examined[worker_id] = request

    def vacate(self, request: InFlightRequest) -> bool:
        """Whether its worker may take another suspect, now that this request is none there any more."""
        if request.worker_id is None or self._examined.get(request.worker_id) is not request:
            return False
        del self._examined[request.worker_id]
        return True

    def rest(self, worker_id: str) -> None:
        """It cannot take requests just now."""
        self._rests_until_s[worker_id] = time.monotonic() + REST_S

    def is_rested(self, worker_id: str) -> None:
        """It has begun anew, or is gone."""
        self._rests_until_s.pop(worker_id, None)
