"""`Placer`: chooses a worker for each request by what every worker has cached and has to do, and checks its predictions.

- **hit**: the longest prefix of a prompt that a worker has in its prefix cache.
- **home**: the worker that a prompt's first uncached tokens hash to. Among workers that are nearly as good, the policy `kv` takes
  the home, so that all routers send the same prefix to the same worker.
- **prediction**: the hit that the router's copy of a prefix index promises. The worker's first output has the actual hit, and the
  placer reports the difference.
- **source**: another worker, from which the chosen one fetches the prefix if that is faster than computing it (`prefix_fetches`).
- **role**: if there are workers of both roles, `prefill` workers compute prompts and first tokens, and `decode` workers the rest
  (`prefill_decode`).
"""

import random
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from transom_cluster.routing.fleet_index import FleetPrefixIndex, Hits
from transom_cluster.routing.policy import Reason, TieBreak, choose
from transom_cluster.routing.prefill_decode import Takers, choose_takers
from transom_cluster.routing.prefix_fetches import Fetches, find_fetches, window_of
from transom_cluster.routing.prompt_hashes import PromptHashes
from transom_cluster.routing.worker_table import Selection, WorkerTable
from transom_cluster.routing.worker_view import HitTokens, PlacedRequest, WorkerView
from transom_core.config import RoutingPolicy
from transom_core.contract import PrefixSource, Request, Usage, WorkerInfo, WorkerMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDecision:
    """The worker for a request, the reason for the choice, and the predicted hit.

    The hit includes what the worker fetches from `source`. With `is_prefill_only` another worker continues after the first token,
    by present knowledge `decoder`; None if that cannot be foreseen.
    """

    worker_id: str
    reason: Reason
    predicted: HitTokens
    source: PrefixSource | None = None
    is_prefill_only: bool = False
    decoder: str | None = None


class PlacementObserver:
    """Receives the reports of one placer. The methods of this class do nothing; subclasses override those they need.

    The placer itself imports no metrics library, so that benchmarks and simulations can run it without one.
    """

    def joined(self, policy: RoutingPolicy, worker: str) -> None:
        """Note that a worker takes requests from now on. It may have been connected before."""

    def placed(self, policy: RoutingPolicy, worker: str, reason: Reason, *, cost_s: float) -> None:
        """Note that the policy chose a worker for a request, which took the router `cost_s` seconds."""

    def hit_measured(self, *, predicted: HitTokens, actual: HitTokens) -> None:
        """Note that the first output of a request has come, with the prompt tokens that the worker found in its prefix cache."""

    def mirror_changed(self, worker: str, *, num_blocks: int, version: int) -> None:
        """Note that the mirror of a worker's prefix index changed."""

    def mirror_reset(self, worker: str) -> None:
        """Note that a mirror missed an update; the router asks the worker for its whole index."""

    def forget(self, policy: RoutingPolicy, worker: str) -> None:
        """Note that a worker has left or was lost, so metric series with its label should end."""


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
        self._requests: dict[str, PlacedRequest] = {}  # by request id, of all workers

    @property
    def workers(self) -> Mapping[str, WorkerView]:
        """Return the workers by id."""
        return self._table.workers

    def add_worker(self, worker_id: str, info: WorkerInfo) -> None:
        """Add a worker whose stream was opened, and forget what was known about it before."""
        self._drop(worker_id)
        self._table.add(WorkerView(worker_id, info, self.index))
        self._observer.joined(self.policy, worker_id)

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker and the requests that were placed there; an unknown worker is ignored."""
        if self._drop(worker_id):
            self._observer.forget(self.policy, worker_id)

    def update(self, worker_id: str, message: WorkerMessage) -> bool:
        """Apply the index updates and load report of a worker's message; return False if it must send its whole index again."""
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

    def place(
        self, request: Request, among: Collection[str], *, sources: Collection[str] | None = None
    ) -> PlacementDecision:
        """Choose one of the workers `among` (not empty, all added) for a request, and note that the request is there.

        `sources` are the workers from which its prefix may be fetched; None means those of `among`.
        """
        begin_s = time.perf_counter()
        self.ended(request.request_id)
        known = among if sources is None else {*among, *sources}
        selection = self._table.select(known)
        num_tokens = request.num_prompt_tokens + len(request.resumed_output_ids)
        # The hit of each worker, and its facts if it uses only its own cache.
        hits = self._hits(request, num_tokens, selection)
        alone = self._table.candidates(selection, num_tokens - hits.start, hits.load_s)
        # The workers for which fetching the prefix from another worker pays, and the facts with these fetches.
        fetches = Fetches.none(selection)
        if request.reads_prefix_cache:
            fetches = find_fetches(
                request, selection, hits, alone, sources=known if sources is None else sources, turn=self._turn
            )
        start = np.where(fetches.pays, fetches.start, hits.start)
        extra_s = np.where(fetches.pays, fetches.seconds, hits.load_s)
        # The workers that may take the request, by the caller's choice and by their roles.
        allowed = np.array(sorted(selection.positions[worker_id] for worker_id in among))
        candidates = replace(alone, num_to_compute=num_tokens - start, extra_s=extra_s)
        split = Takers(allowed)
        if selection.has_roles:
            split = choose_takers(request, selection, allowed, candidates)
        home = self._home(request, int(hits.start.max()), selection.workers[0])
        tie_break = TieBreak(turn=self._turn, draw=self._rng.random(), home=home)
        chosen, reason = choose(self.policy, candidates.at(split.positions), tie_break)
        decoder = None
        decoders = allowed[selection.may_decode[allowed]]
        # When the first token is there, `kv` alone will look at which decoder has the blocks.
        if split.is_prefill_only and (self.policy == "kv" or len(decoders) == 1):
            at, _ = choose(self.policy, candidates.at(decoders), tie_break)
            decoder = selection.workers[int(decoders[at])].worker_id
        self._turn += 1
        chosen = int(split.positions[chosen])
        worker = selection.workers[chosen]
        if fetches.was_asked[chosen] and not request.resumed_output_ids:
            worker.fetched_last = bool(fetches.pays[chosen])
        placed = PlacedRequest(
            worker_id=worker.worker_id,
            num_tokens=num_tokens,
            num_to_compute=num_tokens - int(start[chosen]),
            predicted=HitTokens.up_to(
                request.num_prompt_tokens,
                device=int(hits.device_start[chosen]),
                host=int(hits.memory_start[chosen]),
                disk=int((hits.memory_start if fetches.pays[chosen] else hits.start)[chosen]),
                peer=int(start[chosen]),
            ),
        )
        self._requests[request.request_id] = worker.requests[request.request_id] = placed
        self._table.changed(worker)
        self._observer.placed(self.policy, worker.worker_id, reason, cost_s=time.perf_counter() - begin_s)
        return PlacementDecision(
            worker_id=worker.worker_id,
            reason=reason,
            predicted=placed.predicted,
            source=fetches.source_of(chosen),
            is_prefill_only=split.is_prefill_only,
            decoder=decoder,
        )

    def first_event(self, request_id: str, usage: Usage) -> int | None:
        """Compare the prediction with the actual hit when a request's first output has come.

        Returns predicted minus actual tokens, once for each placement; None if there is nothing to compare.
        """
        placed = self._requests.get(request_id)
        if placed is None or placed.has_begun:
            return None
        placed.has_begun = True
        self._table.changed(self.workers[placed.worker_id])
        actual = HitTokens(
            usage.num_cached_tokens - usage.num_host_tokens,
            usage.num_host_tokens - usage.num_disk_tokens - usage.num_fetched_tokens,
            usage.num_disk_tokens,
            usage.num_fetched_tokens,
        )
        self._observer.hit_measured(predicted=placed.predicted, actual=actual)
        return placed.predicted.total - actual.total

    def ended(self, request_id: str) -> None:
        """Note that a request has left its worker for any reason; an unknown request is ignored."""
        placed = self._requests.pop(request_id, None)
        if placed is not None:
            worker = self.workers[placed.worker_id]
            del worker.requests[request_id]
            self._table.changed(worker)

    def _hits(self, request: Request, num_tokens: int, selection: Selection) -> Hits:
        """Return the hits of all workers of a selection. Workers whose caches have the same shape are searched together."""
        hits = Hits.none(len(selection.workers))
        for equal in selection.by_cache:
            shape = equal.mirrors[0].shape
            if shape.enable_prefix_caching and request.reads_prefix_cache:
                prompt = self._hashes.of(request, shape)
                hits.put(equal.positions, self.index.find_hits(equal.mirrors, prompt, num_tokens, window_of(request)))
        return hits

    def _home(self, request: Request, hit_tokens: int, worker: WorkerView) -> bytes:
        """Return the digest of the first hash block after the best hit, or of the last hash block if all are hit; empty if the
        prompt has no whole hash block or does not use the prefix cache."""
        if not (worker.mirror.shape.enable_prefix_caching and request.reads_prefix_cache):
            return b""
        prompt = self._hashes.of(request, worker.mirror.shape)
        return prompt.digest(min(hit_tokens // prompt.block_size, prompt.num_blocks - 1)) if prompt.num_blocks else b""

    def _drop(self, worker_id: str) -> bool:
        worker = self._table.remove(worker_id)
        if worker is not None:
            worker.mirror.leave()
            for request_id in worker.requests:
                del self._requests[request_id]
        return worker is not None
