"""What a router knows of one worker: its index, its last load report, and what the router itself has sent there."""

from __future__ import annotations

from dataclasses import dataclass

from transom_cluster.routing.index_mirror import PrefixIndexMirror
from transom_cluster.routing.policy import Candidate
from transom_worker.contract import WorkerInfo, WorkerLoad

# A report that comes right after a request was sent may have been written before it arrived; the second one has it.
SETTLED_REPORTS = 2


@dataclass(slots=True, kw_only=True)
class PlacedRequest:
    """One request on its worker."""

    worker_id: str
    num_tokens: int
    num_to_compute: int
    predicted_tokens: int  # of the prompt, from the cache
    report: int  # how many load reports the worker had given when it was sent
    has_begun: bool = False  # its answer


class KnownWorker:
    """One worker."""

    def __init__(self, worker_id: str, info: WorkerInfo) -> None:
        self.worker_id = worker_id
        self.mirror = PrefixIndexMirror(info.cache, max_model_len=info.max_model_len)
        self.placements: dict[str, PlacedRequest] = {}  # by request id, until they end
        self.num_reports = 0
        self._load = WorkerLoad()

    def report(self, load: WorkerLoad) -> None:
        """The worker told its load."""
        self._load = load
        self.num_reports += 1

    def candidate(self, num_to_compute: int) -> Candidate:
        """A snapshot for a request of which so many tokens would be computed here."""
        load = self._load
        return Candidate(
            worker_id=self.worker_id,
            num_to_compute=num_to_compute,
            queue_tokens=self._queue_tokens(),
            num_requests=max(load.num_running + load.num_waiting, len(self.placements)),
            max_num_seqs=load.max_num_seqs,
            used_share=load.used_share,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_step_s=load.decode_step_s,
        )

    def _queue_tokens(self) -> int:
        """Tokens to compute before a new request's.

        Of this router's requests the hits are known, so they count by what they compute: the recent ones whole, the others at most
        what the worker reports. Whatever it reports beyond their lengths is there for other routers.
        """
        reported, settled, recent, whole = self._load.waiting_tokens, 0, 0, 0
        for placement in self.placements.values():
            if placement.has_begun:
                continue
            whole += placement.num_tokens
            if self.num_reports - placement.report >= SETTLED_REPORTS:
                settled += placement.num_to_compute
            else:
                recent += placement.num_to_compute
        return min(settled, reported) + recent + max(0, reported - whole)
