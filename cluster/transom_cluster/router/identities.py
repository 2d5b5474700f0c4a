"""Which models the workers have now, told apart by their identities, and which of them new requests go to. Pure.

- **identity**: the digest of a worker's model and of all that decides its numbers (`WorkerInfo.identity`); empty where it is not
  known. While a redeploy replaces v1 by v2, a router has workers of both.
- An answer is computed by one identity from its first token to its last, in all its choices (`OutputStream.identity`).
- A new request goes to the newest identity, unless all its workers are busy: while v2 has only its first worker, v1's workers take
  what this one cannot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from transom_core.errors import WorkerLost

if TYPE_CHECKING:
    from transom_cluster.router.worker_connection import WorkerConnection

MODEL_GONE = (
    "The model was replaced by another while this answer was computed, and its last worker is gone; an answer of two models would "
    "be wrong. Send the request again."
)


def by_identity(connections: Iterable[WorkerConnection]) -> dict[str, list[WorkerConnection]]:
    """Group workers by identity, the newest identity first: that of the worker which began to load last."""
    groups: dict[str, list[WorkerConnection]] = {}
    for connection in connections:
        groups.setdefault(connection.identity, []).append(connection)
    return dict(sorted(groups.items(), key=lambda item: -max(one.loaded_at_s for one in item[1])))


def of_one_identity(willing: list[WorkerConnection], pinned: str | None) -> list[WorkerConnection]:
    """Choose the workers of one identity for a request: those of `pinned`, or where that is None those of the newest identity that
    is not full, else those of the identity that is the least full."""
    if pinned is not None:
        return [one for one in willing if one.identity == pinned]
    groups = list(by_identity(willing).values())
    return min(groups, key=_fill, default=[])  # of equal ones the first, so the newest


def is_gone(identity: str, connections: Mapping[str, WorkerConnection]) -> bool:
    """Whether no worker of an identity can come: there are workers of others, and none that may still be of this one.

    A worker that is lost comes again with the present files, so with the identity of the others.
    """
    present = [one for one in connections.values() if not one.is_draining]
    may_come = any(one.info is None or one.identity == identity for one in present)
    return not may_come and any(one.is_open for one in present)


def model_gone() -> WorkerLost:
    """The error that ends an answer whose identity no worker has any more."""
    return WorkerLost(MODEL_GONE)


def _fill(group: Sequence[WorkerConnection]) -> float:
    """Requests per running slot of some workers; 0 as long as a slot is free, so that a new request would not wait."""
    num_requests, num_slots = sum(one.num_requests for one in group), sum(one.max_num_seqs for one in group)
    return num_requests / num_slots if num_requests >= num_slots else 0.0
