"""Groups workers by the identity of their model, and chooses the identity that computes a request. Pure functions.

- **identity**: the digest of a worker's model and of everything else that its numbers depend on (`WorkerInfo.identity`); empty if
  it is not known. While a redeploy replaces model v1 by v2, a router has workers of both.
- One identity computes all of an answer: every token of every choice (`OutputStream.identity`).
- A new request goes to the newest identity, unless all its workers are busy or in quarantine: while v2 has only its first worker,
  v1's workers take the requests that this worker cannot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transom_cluster.router.worker_connection import WorkerConnection

MODEL_GONE = (
    "The model was replaced by another while this answer was computed, and its last worker is gone; an answer of two models would "
    "be wrong. Send the request again."
)


def by_identity(connections: Iterable[WorkerConnection]) -> dict[str, list[WorkerConnection]]:
    """Group workers by identity, the newest identity first. The newest is that of the worker which began to load its model last."""
    groups: dict[str, list[WorkerConnection]] = {}
    for connection in connections:
        groups.setdefault(connection.identity, []).append(connection)
    return dict(sorted(groups.items(), key=lambda item: -max(one.loaded_at_s for one in item[1])))


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


def _fill(group: Sequence[WorkerConnection]) -> float:
    """Return the requests per running slot of some workers; 0 if a slot is free, so that a new request would not wait."""
    num_requests, num_slots = sum(one.num_requests for one in group), sum(one.max_num_seqs for one in group)
    return num_requests / num_slots if num_requests >= num_slots else 0.0
