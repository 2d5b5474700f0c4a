"""`WorkerTable`: the facts about all workers that the routing policies read, as an array for each fact with an item for each
worker.

With 200 workers, most facts are the same from one placement to the next. So a worker's facts are computed again only after it sent
a message or got a request, and the list of workers to choose from is prepared once and used until it changes.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from transom_cluster.routing.fleet_index import PrefixIndexMirror
from transom_cluster.routing.policy import FACTS, Candidates, worker_seed
from transom_cluster.routing.worker_view import WorkerView

LEAST_ROWS = 16  # the table begins with this many rows, and doubles when it is full


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualCaches:
    """Workers of a selection whose caches have the same shape, so that one search covers them."""

    positions: npt.NDArray[np.int64]  # in the selection
    mirrors: Sequence[PrefixIndexMirror]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Some workers, in the order of their ids."""

    among: list[str]  # the worker ids in the caller's order
    workers: Sequence[WorkerView]
    rows: npt.NDArray[np.int64]  # in the table
    by_cache: Sequence[EqualCaches]
    positions: Mapping[str, int]  # by worker id
    can_fetch: npt.NDArray[np.bool_]
    may_decode: npt.NDArray[np.bool_]  # by the workers' roles
    has_roles: bool  # some worker has a role other than "both"


class WorkerTable:
    """The workers by id, and the facts about each of them."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerView] = {}
        self._rows: dict[str, int] = {}
        self._free_rows: list[int] = []
        self._facts = np.zeros((len(FACTS), 0), np.float64)
        self._seeds = np.zeros(0, np.uint64)
        self._changed: dict[str, WorkerView] = {}
        self._selection: Selection | None = None  # the last one

    def add(self, worker: WorkerView) -> None:
        """Add a worker whose id is not in the table."""
        if not self._free_rows:
            num_rows = len(self._seeds)
            num_more = max(LEAST_ROWS, num_rows)
            self._facts = np.hstack([self._facts, np.zeros((len(FACTS), num_more))])
            self._seeds = np.concatenate([self._seeds, np.zeros(num_more, np.uint64)])
            self._free_rows = list(range(num_rows, num_rows + num_more))
        row = self._rows[worker.worker_id] = self._free_rows.pop()
        self._seeds[row] = worker_seed(worker.worker_id)
        self.workers[worker.worker_id] = worker
        self._selection = None
        self.changed(worker)

    def remove(self, worker_id: str) -> WorkerView | None:
        """Remove a worker and return it; None if it is unknown."""
        worker = self.workers.pop(worker_id, None)
        if worker is not None:
            self._free_rows.append(self._rows.pop(worker_id))
            self._changed.pop(worker_id, None)
            self._selection = None
        return worker

    def changed(self, worker: WorkerView) -> None:
        """Note that a worker's load or requests changed."""
        self._changed[worker.worker_id] = worker

    def select(self, among: Collection[str]) -> Selection:
        """Return the selection of these workers, at least one. The last selection is kept, and returned again for the same ids."""
        worker_ids = list(among)
        if self._selection is None or self._selection.among != worker_ids:
            workers = [self.workers[worker_id] for worker_id in sorted(worker_ids)]
            by_cache: dict[int, list[int]] = {}
            for position, worker in enumerate(workers):
                by_cache.setdefault(id(worker.mirror.rules), []).append(position)
            self._selection = Selection(
                among=worker_ids,
                workers=workers,
                rows=np.array([self._rows[worker.worker_id] for worker in workers]),
                by_cache=[
                    EqualCaches(positions=np.array(equal), mirrors=[workers[position].mirror for position in equal])
                    for equal in by_cache.values()
                ],
                positions={worker.worker_id: position for position, worker in enumerate(workers)},
                can_fetch=np.array([worker.can_fetch for worker in workers]),
                may_decode=np.array([worker.role != "prefill" for worker in workers]),
                has_roles=any(worker.role != "both" for worker in workers),
            )
        return self._selection

    def candidates(
        self,
        selection: Selection,
        num_to_compute: npt.NDArray[np.int64],
        extra_s: npt.NDArray[np.float64] | None = None,
    ) -> Candidates:
        """Return the workers of a selection as candidates for a request, of which each would compute `num_to_compute` tokens after
        `extra_s` seconds of loading or fetching."""
        for worker_id, worker in self._changed.items():
            self._facts[:, self._rows[worker_id]] = worker.candidate(0).facts
        self._changed.clear()
        return Candidates(
            num_to_compute=num_to_compute,
            extra_s=np.zeros(len(num_to_compute)) if extra_s is None else extra_s,
            facts=self._facts[:, selection.rows],
            seeds=self._seeds[selection.rows],
        )
