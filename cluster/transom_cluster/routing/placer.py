"""Chooses a worker for each request, by what every worker has cached and has to do, and checks what it predicted.

- **hit**: the longest prefix of a prompt that a worker has in its prefix cache.
- **home**: the worker that a prompt's first uncached tokens hash to. Among workers that are nearly as good the policy `kv` takes
  the home, so that all routers send the same prefix to the same worker.
- **prediction**: the hit that the router's prefix index promises. The worker's first output has the actual hit; the difference is
  measured.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from transom_cluster.routing.fleet_index import FleetPrefixIndex
from transom_cluster.routing.index_code import Integers
from transom_cluster.routing.placement_observer import PlacementObserver
from transom_cluster.routing.policy import Reason, TieBreak, choose
from transom_cluster.routing.prompt_hashes import PromptHashes
from transom_cluster.routing.worker_table import Selection, WorkerTable
from transom_cluster.routing.worker_view import PlacedRequest, WorkerView
from transom_worker.config import RoutingPolicy
from transom_worker.contract import Request, Usage, WorkerInfo, WorkerMessage
from transom_worker.kvcache.events import CacheShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDecision:
    """The worker for a request, the reason for it, and the predicted hit in tokens at this version of the worker's prefix index."""

    worker_id: str
    reason: Reason
    predicted_tokens: int
    index_version: int


class Placer:
    """One router's view of all workers, by worker id. Not thread-safe: one event loop calls it, and every call is short."""

    def __init__(self, policy: RoutingPolicy, *, seed: int = 0, observer: PlacementObserver | None = None) -> None:
        self.policy = policy
        self._rng = random.Random(seed)
        self._turn = self._rng.randrange(1 << 16)  # so that routers that start together begin at different workers
        self._observer = observer or PlacementObserver()
        self._hashes = PromptHashes()
        self.index = FleetPrefixIndex()
        self._table = WorkerTable()
        self._requests: dict[str, PlacedRequest] = {}  # at all workers, by request id

    @property
    def workers(self) -> Mapping[str, WorkerView]:
        """The workers by id."""
        return self._table.workers

    def add_worker(self, worker_id: str, info: WorkerInfo) -> None:
        """Begin with a worker whose stream was opened; forget what was known of it before."""
        self._drop(worker_id)
        self._table.add(WorkerView(worker_id, info, self.index))
        self._observer.joined(self.policy, worker_id)

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker and the requests that were placed there; an unknown worker is ignored."""
        if self._drop(worker_id):
            self._observer.forget(self.policy, worker_id)

    def update(self, worker_id: str, message: WorkerMessage) -> bool:
        """Take in the index updates and the load of a worker's message; False where that worker has to send its whole index
        again."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return True
        if message.load is not None:
            worker.report(message.load, message.taken)
            self._table.changed(worker)
        if message.kv is None:
            return True
        has_no_gap = worker.mirror.apply(message.kv)
        self._observer.mirror_changed(worker_id, num_blocks=worker.mirror.num_blocks, version=worker.mirror.version)
        if not has_no_gap:
            self._observer.mirror_reset(worker_id)
        return has_no_gap

    def place(self, request: Request, among: Collection[str]) -> PlacementDecision:
        """Choose one of the workers `among` (not empty, all added) for a request, and note that the request is there."""
        begin_s = time.perf_counter()
        self.ended(request.request_id)
        selection = self._table.select(among)
        num_tokens = request.num_prompt_tokens + len(request.resumed_output_ids)
        hits = self._hits(request, num_tokens, selection)
        candidates = self._table.candidates(selection, num_tokens - hits)
        home = self._home(request, int(hits.max()), selection.workers[0])
        tie_break = TieBreak(turn=self._turn, draw=self._rng.random(), home=home)
        chosen, reason = choose(self.policy, candidates, tie_break)
        self._turn += 1
        worker, hit_tokens = selection.workers[chosen], int(hits[chosen])
        placed = PlacedRequest(
            worker_id=worker.worker_id,
            num_tokens=num_tokens,
            num_to_compute=num_tokens - hit_tokens,
            predicted_tokens=min(hit_tokens, request.num_prompt_tokens),
        )
        self._requests[request.request_id] = worker.requests[request.request_id] = placed
        self._table.changed(worker)
        self._observer.placed(self.policy, worker.worker_id, reason, cost_s=time.perf_counter() - begin_s)
        return PlacementDecision(
            worker_id=worker.worker_id,
            reason=reason,
            predicted_tokens=placed.predicted_tokens,
            index_version=worker.mirror.version,
        )

    def first_event(self, request_id: str, usage: Usage) -> int | None:
        """Compare the prediction with the actual hit when a request's first output has come.

        Returns predicted minus actual tokens, once for each placement; None where there is nothing to compare.
        """
        placed = self._requests.get(request_id)
        if placed is None or placed.has_begun:
            return None
        placed.has_begun = True
        self._table.changed(self.workers[placed.worker_id])
        self._observer.hit_measured(predicted=placed.predicted_tokens, actual=usage.num_cached_tokens)
        return placed.predicted_tokens - usage.num_cached_tokens

    def ended(self, request_id: str) -> None:
        """Note that a request has left its worker, for whatever reason; an unknown request is ignored."""
        placed = self._requests.pop(request_id, None)
        if placed is not None:
            worker = self.workers[placed.worker_id]
            del worker.requests[request_id]
            self._table.changed(worker)

    def _hits(self, request: Request, num_tokens: int, selection: Selection) -> Integers:
        """For each worker the tokens that it need not compute. Workers whose caches have one shape are searched together."""
        hits = np.zeros(len(selection.workers), np.int64)
        for equal in selection.by_cache:
            shape = equal.mirrors[0].shape
            if _reads_cache(request, shape):
                prompt = self._hashes.of(request, shape.block_size)
                hits[equal.positions] = self.index.find(equal.mirrors, prompt, num_tokens)
        return hits

    def _home(self, request: Request, hit_tokens: int, worker: WorkerView) -> bytes:
        """The digest of the first hash block after the best hit, or of the last hash block; empty where the prompt has none."""
        if not _reads_cache(request, worker.mirror.shape):
            return b""
        prompt = self._hashes.of(request, worker.mirror.shape.block_size)
        return prompt.digest(min(hit_tokens // prompt.block_size, prompt.num_blocks - 1)) if prompt.num_blocks else b""

    def _drop(self, worker_id: str) -> bool:
        worker = self._table.remove(worker_id)
        if worker is not None:
            worker.mirror.leave()
            for request_id in worker.requests:
                del self._requests[request_id]
        return worker is not None


def _reads_cache(request: Request, shape: CacheShape) -> bool:
    return shape.enable_prefix_caching and request.params.prompt_logprobs is None
