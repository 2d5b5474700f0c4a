"""Decides which workers may take which requests: those of one model, and apart from requests that may have ended a worker.

- **identity**: the digest of a worker's model and of everything else that its numbers depend on (`WorkerInfo.identity`); empty if
  it is not known. While a redeploy replaces model v1 by v2, a router has workers of both.
- One identity computes all of an answer: every token of every choice (`OutputStream.identity`).
- A new request goes to the newest identity, unless all its workers are busy or in quarantine: while v2 has only its first worker,
  v1's workers take the requests that this worker cannot. If an operator replaced A's weights by B's in place, B is newer, even if a
  worker that starts later has A.
- **strike**: the loss of a worker that counts against a request which ran there (`failover`).
- **suspect**: a request with a strike. A worker has at most one suspect.
- **on trial**: a suspect that the router stops after one more strike. It runs alone: its worker gets no other request, and it is
  placed only at a worker whose requests have all made progress there (`RELEASE_TOKENS` tokens). While it waits for such a worker,
  one worker is *reserved* for it: the one with the fewest requests without progress gets no new ones.

A request that has made progress on a worker may stay there, because the worker has survived the steps of this request.
"""

from collections.abc import Iterable, Mapping, Sequence

from transom_cluster.router.failover import RELEASE_TOKENS
from transom_cluster.router.in_flight_requests import InFlightRequest
from transom_cluster.router.worker_connection import WorkerConnection

MODEL_GONE = (
    "The model was replaced by another while this answer was computed, and its last worker is gone; an answer of two models would "
    "be wrong. Send the request again."
)


def by_identity(connections: Iterable[WorkerConnection]) -> dict[str, list[WorkerConnection]]:
    """Group workers by identity, the newest identity first. The newest is that of the worker which began to load its model last, of
    the identities that no other worker's update has replaced."""
    groups: dict[str, list[WorkerConnection]] = {}
    for connection in connections:
        groups.setdefault(connection.identity, []).append(connection)
    replaced = {old for group in groups.values() for one in group for old in one.replaced}
    order = {name: (name in replaced, -max(one.loaded_at_s for one in group)) for name, group in groups.items()}
    return dict(sorted(groups.items(), key=lambda item: order[item[0]]))


def in_order_of_choice(willing: Iterable[WorkerConnection], pinned: str | None) -> list[list[WorkerConnection]]:
    """Group workers by the identities that may compute a request, the first choice first.

    `pinned` is the only one that may; if it is None, all may: first the newest one with a free slot, then by how full they are.
    """
    groups = by_identity(willing)
    if pinned is not None:
        return [groups[pinned]] if pinned in groups else []
    return sorted(groups.values(), key=_fill)  # equal groups stay in order, the newest first


def is_gone(identity: str, connections: Mapping[str, WorkerConnection]) -> bool:
    """Return whether no worker will have this identity any more: workers of other identities take requests, and every present
    worker is known to have another identity.

    A lost worker is restarted with the present files, so it gets the identity of the other workers.
    """
    present = [one for one in connections.values() if not one.is_draining]
    may_come = any(one.info is None or one.identity == identity for one in present)
    return not may_come and any(one.is_open for one in present)


def successor(identity: str, connections: Iterable[WorkerConnection]) -> str | None:
    """Return the identity by which an operator has replaced this one in place; None if no connected worker tells."""
    return next((one.identity for one in connections if one.is_open and identity in one.replaced), None)


def _fill(group: Sequence[WorkerConnection]) -> float:
    """Return the requests per running slot of some workers; 0 if a slot is free, so that a new request would not wait."""
    num_requests, num_slots = sum(one.num_requests for one in group), sum(one.max_num_seqs for one in group)
    return num_requests / num_slots if num_requests >= num_slots else 0.0


class Quarantine:
    """Keeps suspects apart, on one event loop."""

    def __init__(self, *, max_lost_workers: int) -> None:
        self._max_lost_workers = max_lost_workers
        self.trials: set[InFlightRequest] = set()  # requests on trial; `_reserved` drops those whose trial has ended

    def watch(self, requests: Iterable[InFlightRequest]) -> None:
        """Note which of these requests, whose worker was lost, are on trial from now on."""
        self.trials.update(request for request in requests if self._is_on_trial(request))

    def allowed(self, request: InFlightRequest, willing: Sequence[WorkerConnection]) -> list[WorkerConnection]:
        """Return those of the workers `willing` to take a request that may have it. All in `willing` serve one model."""
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
        """Return the worker that is reserved for a waiting request on trial; None if no such request waits."""
        if not self.trials:
            return None
        self.trials = {one for one in self.trials if not one.has_ended and self._is_on_trial(one)}
        # A waiting request may go to these workers if they serve the model that its stream began with, or if it has no such (None).
        identities = {None, *(one.identity for one in willing)}
        waiting = next(
            (one for one in self.trials if one.worker_id is None and one.output.identity in identities), None
        )
        if waiting is None:
            return None
        open_to_it = [one for one in willing if one.suspect is None and one.worker_id not in waiting.refusals]
        return min(open_to_it, key=lambda one: (_num_unproven(one), one.worker_id), default=None)


def _num_unproven(connection: WorkerConnection) -> int:
    """Return the number of a worker's requests that have not made progress there yet."""
    return sum(request.num_new_tokens < RELEASE_TOKENS for request in connection.in_flight.requests)
