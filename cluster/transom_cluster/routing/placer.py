"""Chooses a worker for each request by what every worker has cached and has to do, and checks what it predicted."""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from dataclasses import dataclass

from transom_cluster.routing.placement_observer import PlacementObserver
from transom_cluster.routing.policy import Chance, Reason, choose
from transom_cluster.routing.prompt_hashes import PromptHashes
from transom_cluster.routing.worker_view import KnownWorker, PlacedRequest
from transom_worker.config import RoutingPolicy
from transom_worker.contract import Request, Usage, WorkerInfo, WorkerMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDecision:
    """Where a request goes and why, and how many of its prompt tokens that worker has cached at that version of its index."""

    worker_id: str
    reason: Reason
    predicted_tokens: int
    index_version: int


class Placer:
    """One router's view of all workers. Not thread-safe: one event loop calls it, and every call is short."""

    def __init__(self, policy: RoutingPolicy, *, seed: int = 0, observer: PlacementObserver | None = None) -> None:
        self.policy = policy
        self._rng = random.Random(seed)
        self._turn = self._rng.randrange(1 << 16)  # routers that start together begin elsewhere
        self._observer = observer or PlacementObserver()
        self._prompt_hashes = PromptHashes()
        self._workers: dict[str, KnownWorker] = {}
        self._placements: dict[str, PlacedRequest] = {}

    def add_worker(self, worker_id: str, info: WorkerInfo) -> None:
        """A worker's stream was opened; what was known of an earlier one is forgotten."""
        self._drop(worker_id)
        self._workers[worker_id] = KnownWorker(worker_id, info)
        self._observer.joined(self.policy, worker_id)

    def remove_worker(self, worker_id: str) -> None:
        """A worker is gone, with what was placed there; an unknown one is ignored."""
        if self._drop(worker_id):
            self._observer.forget(self.policy, worker_id)

    def update(self, worker_id: str, message: WorkerMessage) -> bool:
        """Take in what a worker's message says of index and load; False: ask that worker to `resync`."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return True
        if message.load is not None:
            worker.report(message.load)
        if message.kv is None:
            return True
        follows = worker.mirror.apply(message.kv)
        self._observer.mirrored(worker_id, num_blocks=worker.mirror.num_blocks, version=worker.mirror.version)
        if not follows:
            self._observer.resync(worker_id)
        return follows

    def place(self, request: Request, among: Collection[str]) -> PlacementDecision:
        """Choose one of the workers `among` (not empty, all added) for a request, again if it has to go on elsewhere."""
        begin_s = time.perf_counter()
        self.ended(request.request_id)
        workers = [self._workers[worker_id] for worker_id in sorted(among)]
        num_tokens = request.num_prompt_tokens + len(request.resumed_output_ids)
        hits = [self._hit_tokens(request, num_tokens, worker) for worker in workers]
        candidates = [w.candidate(num_tokens - hit) for w, hit in zip(workers, hits, strict=True)]
        home = self._home(request, max(hits), workers[0])
        chosen, reason = choose(self.policy, candidates, Chance(turn=self._turn, draw=self._rng.random(), home=home))
        self._turn += 1
        worker = self._workers[chosen.worker_id]
        placement = PlacedRequest(
            worker_id=chosen.worker_id,
            num_tokens=num_tokens,
            num_to_compute=chosen.num_to_compute,
            predicted_tokens=min(num_tokens - chosen.num_to_compute, request.num_prompt_tokens),
            report=worker.num_reports,
        )
        self._placements[request.request_id] = worker.placements[request.request_id] = placement
        self._observer.placed(self.policy, chosen.worker_id, reason, cost_s=time.perf_counter() - begin_s)
        return PlacementDecision(
            worker_id=chosen.worker_id,
            reason=reason,
            predicted_tokens=placement.predicted_tokens,
            index_version=worker.mirror.version,
        )

    def first_event(self, request_id: str, usage: Usage) -> int | None:
        """An answer has begun: predicted minus actual hit tokens, once per placement; None if there is nothing to compare."""
        placement = self._placements.get(request_id)
        if placement is None or placement.has_begun:
            return None
        placement.has_begun = True
        self._observer.compared(predicted=placement.predicted_tokens, actual=usage.num_cached_tokens)
        return placement.predicted_tokens - usage.num_cached_tokens

    def ended(self, request_id: str) -> None:
        """A request is no longer on its worker: answered, failed or aborted; unknown ids are ignored."""
        placement = self._placements.pop(request_id, None)
        if placement is not None:
            del self._workers[placement.worker_id].placements[request_id]

    def _hit_tokens(self, request: Request, num_tokens: int, worker: KnownWorker) -> int:
        """Tokens that a worker need not compute."""
        if not _reads_cache(request, worker):
            return 0
        mirror = worker.mirror
        return mirror.find(self._prompt_hashes.of(request, mirror.shape.block_size), num_tokens).start

    def _home(self, request: Request, hit_tokens: int, worker: KnownWorker) -> bytes:
        """The digest of the first block behind the best hit, or of the last one; empty where nothing is hashed."""
        if not _reads_cache(request, worker):
            return b""
        block_size = worker.mirror.shape.block_size
        chain = self._prompt_hashes.of(request, block_size)
        return chain[min(hit_tokens // block_size, len(chain) - 1)] if chain else b""

    def _drop(self, worker_id: str) -> bool:
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            for request_id in worker.placements:
                del self._placements[request_id]
        return worker is not None


def _reads_cache(request: Request, worker: KnownWorker) -> bool:
    return worker.mirror.shape.enable_prefix_caching and request.params.prompt_logprobs is None
