"""Which workers may take which requests while there are suspects (`failover`): suspects run apart from each other.

- **suspect**: a request that may have ended a worker. No worker has two of them.
- **on trial**: a suspect that lacks one strike. It runs alone: its worker gets no other request, and it gets no worker with
  requests that have not made progress there yet (`RELEASE_TOKENS`). While it waits for such a worker, one is *reserved*: the one
  with the fewest of these requests gets no others.

A request that has made progress on a worker may stay there: it has run its steps on this worker, and the worker is still there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from transom_cluster.router.failover import RELEASE_TOKENS
from transom_cluster.router.in_flight_requests import InFlightRequest
from transom_cluster.router.worker_connection import WorkerConnection


class Quarantine:
    """Keeps suspects apart, on one event loop."""

    def __init__(self, *, max_lost_workers: int) -> None:
        self._max_lost_workers = max_lost_workers
        self._trials: set[InFlightRequest] = set()  # requests on trial; those that are not any more are dropped late

    @property
    def has_trials(self) -> bool:
        """Whether requests are on trial."""
        return bool(self._trials)

    def watch(self, requests: Iterable[InFlightRequest]) -> None:
        """Note those of the requests, which were lost, that are on trial from now on."""
        self._trials.update(request for request in requests if self._is_on_trial(request))

    def allowed(self, request: InFlightRequest, willing: Sequence[WorkerConnection]) -> list[WorkerConnection]:
        """Those of the workers `willing` to take a request that may have it."""
        if self._is_on_trial(request):
            return [one for one in willing if one.suspect is None and not _num_unproven(one)]
        reserved = self._reserved(willing)
        if request.record.is_suspect:
            return [one for one in willing if one.suspect is None and one is not reserved]
        return [one for one in willing if not self._has_trial(one) and one is not reserved]

    def _is_on_trial(self, request: InFlightRequest) -> bool:
        return request.record.is_on_trial(self._max_lost_workers)

    def _has_trial(self, connection: WorkerConnection) -> bool:
        return connection.suspect is not None and self._is_on_trial(connection.suspect)

    def _reserved(self, willing: Sequence[WorkerConnection]) -> WorkerConnection | None:
        """The worker that is kept for a request on trial which waits; None where none waits."""
        if not self._trials:
            return None
        self._trials = {one for one in self._trials if not one.has_ended and self._is_on_trial(one)}
        waiting = next((one for one in self._trials if one.worker_id is None), None)
        if waiting is None:
            return None
        open_to_it = [one for one in willing if one.suspect is None and one.worker_id not in waiting.refusals]
        return min(open_to_it, key=lambda one: (_num_unproven(one), one.worker_id), default=None)


def _num_unproven(connection: WorkerConnection) -> int:
    """The number of a worker's requests that have not made progress there yet."""
    return sum(request.num_new_tokens < RELEASE_TOKENS for request in connection.in_flight.requests)
