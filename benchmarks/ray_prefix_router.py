"""What Ray Serve's prefix-aware router (ray.llm, PrefixCacheAffinityRouter) does, over Ray's own prefix tree.

Modelled: `choose_replicas` with its match-rate and imbalance thresholds, the smallest tenants below the match rate, the shortest
queue among the chosen, two drawn by lot where loads are out of balance; prompts (not answers) inserted into one tree that all
routers share; no eviction from the tree, its default. Kinder than the real one: queue lengths are exact and cost nothing, neither
does the tree, and a replica takes any number of requests. A token id is two characters.
"""

from __future__ import annotations

import random
from collections import Counter

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

from transom_core.contract import Request, Usage, WorkerMessage

ALPHABET = 40_000


class RayPrefixState:
    """The tree and the queue lengths, as all routers see them."""

    def __init__(self, workers: list[str]) -> None:
        self.tree = PrefixTree()
        self.tree.add_tenants(workers, 0.0)
        self.queue: Counter[str] = Counter(dict.fromkeys(workers, 0))
        self.worker: dict[str, str] = {}  # by request
        self.num_inserted = 0  # the time of the tree, in which nothing is evicted


class RayPrefixRouter:
    """One router."""

    def __init__(
        self, state: RayPrefixState, seed: int, *, imbalanced_threshold: float, match_rate_threshold: float = 0.1
    ) -> None:
        self._state = state
        self._rng = random.Random(seed)
        self._imbalanced_threshold = imbalanced_threshold
        self._match_rate_threshold = match_rate_threshold

    def choose(self, request: Request) -> str:
        """Among the chosen, the one with the shortest queue."""
        state, text = self._state, text_of(request.prompt_token_ids)
        chosen = self._candidates(text)
        self._rng.shuffle(chosen)
        worker = min(chosen, key=state.queue.__getitem__)
        state.num_inserted += 1
        state.tree.insert(text, worker, float(state.num_inserted))
        state.queue[worker] += 1
        state.worker[request.request_id] = worker
        return worker

    def hear(self, worker_id: str, message: WorkerMessage) -> None:
        """It does not listen."""

    def begun(self, request_id: str, usage: Usage) -> None:
        """Nor here."""

    def ended(self, request_id: str) -> None:
        """A queue is one shorter."""
        self._state.queue[self._state.worker.pop(request_id)] -= 1

    def _candidates(self, text: str) -> list[str]:
        queue = self._state.queue
        workers = list(queue)
        if max(queue.values()) - min(queue.values()) > self._imbalanced_threshold:
            return self._rng.sample(workers, 2)
        matched, tenants = self._state.tree.prefix_match(text, workers)
        if len(matched) / len(text) < self._match_rate_threshold:
            tenants = self._state.tree.get_smallest_tenants()
        return list(tenants or self._rng.sample(workers, 2))


def text_of(token_ids: tuple[int, ...]) -> str:
    """As long as a prompt is, and equal where it is."""
    return "".join(chr(32 + token // ALPHABET) + chr(32 + token % ALPHABET) for token in token_ids)
