"""`WorkerView`: what a router knows about one worker: its prefix index, its last load report, and this router's requests there.

A load report shows the load of a moment ago, and names the requests that it counts for the first time (`WorkerMessage.taken`). The
router adds its requests that no report has named. For example, a worker reports 1,000 waiting tokens, and no report has named a
request with 300 tokens to compute that this router placed there: the router counts 1,300. So the router's count is right however
rarely reports come, and even if a report was written between a request's placement and its arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from transom_cluster.routing.fleet_index import FleetPrefixIndex
from transom_cluster.routing.policy import Candidate
from transom_core.contract import FetchSpeed, PrefixSource, WorkerInfo, WorkerLoad


class HitTokens(NamedTuple):
    """The numbers of prompt tokens that need not be computed, by where their KV comes from."""

    device: int  # the worker's KV pool
    host: int = 0  # its host tier
    disk: int = 0  # its disk tier
    peer: int = 0  # another worker

    @property
    def total(self) -> int:
        """Return the tokens from all places together."""
        return sum(self)

    @classmethod
    def up_to(cls, num_prompt_tokens: int, *, device: int, host: int, disk: int, peer: int) -> HitTokens:
        """Compute the numbers from the ends of what each place has: the device has tokens up to `device`, the host tier up to
        `host`, and so on. Tokens beyond the prompt, which are resumed output, do not count."""
        device, host, disk, peer = (min(end, num_prompt_tokens) for end in (device, host, disk, peer))
        return cls(device, host - device, disk - host, peer - disk)


@dataclass(slots=True, kw_only=True)
class PlacedRequest:
    """One request at its worker."""

    worker_id: str
    num_tokens: int
    num_to_compute: int  # without the predicted hit
    predicted: HitTokens
    is_reported: bool = False  # some load report has counted it
    has_begun: bool = False  # its first output has come


class WorkerView:
    """One worker as the router knows it."""

    def __init__(self, worker_id: str, info: WorkerInfo, index: FleetPrefixIndex) -> None:
        self.worker_id = worker_id
        self.mirror = index.join(info.cache)
        self.role, self.node = info.role, info.node
        self.can_fetch = info.can_fetch and bool(info.block_bytes)
        self.block_bytes = info.block_bytes
        self.fetched_last = False  # the last request that could have fetched its prefix did fetch it
        self.requests: dict[str, PlacedRequest] = {}  # by request id, until they end
        self._load = WorkerLoad()

    def report(self, load: WorkerLoad, taken: Sequence[str] = ()) -> None:
        """Store a load report of the worker, which is the first one that counts the requests `taken`."""
        self._load = load
        for request_id in taken:
            if (request := self.requests.get(request_id)) is not None:
                request.is_reported = True

    def place(self, *, is_on_device: bool) -> str:
        """Return the `PrefixSource.place` of blocks of this worker."""
        return PrefixSource.place_of(self.node, is_on_device=is_on_device)

    def fetch_speed(self, place: str) -> FetchSpeed:
        """Return how fast the worker fetches from a place, or from all if it has not measured this one."""
        speeds = self._load.fetch_speeds
        return speeds.get(place) or speeds.get("", FetchSpeed())

    def candidate(self, num_to_compute: int) -> Candidate:
        """Return the worker as a candidate for a request of which it would compute `num_to_compute` tokens."""
        load = self._load
        num_unreported = sum(not request.is_reported for request in self.requests.values())
        return Candidate(
            worker_id=self.worker_id,
            num_to_compute=num_to_compute,
            queue_tokens=self._queue_tokens(),
            num_requests=load.num_running + load.num_waiting + num_unreported,
            max_num_seqs=load.max_num_seqs,
            used_share=load.used_share,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_step_s=load.decode_step_s,
        )

    def _queue_tokens(self) -> int:
        """Return the number of tokens that the worker computes before those of a new request: the sum of three numbers. Requests
        whose output has begun count nothing.

        - `recent`: this router's requests that no report has counted, each with all its tokens to compute (without its hit).
        - `settled`: this router's reported requests, with their tokens to compute; together at most the reported waiting tokens.
        - Other routers' requests: the reported waiting tokens beyond the whole lengths of this router's reported requests.
        """
        waiting, recent, settled, whole = self._load.waiting_tokens, 0, 0, 0
        for request in self.requests.values():
            if request.has_begun:
                continue
            if request.is_reported:
                settled += request.num_to_compute
                whole += request.num_tokens
            else:
                recent += request.num_to_compute
        return recent + min(settled, waiting) + max(0, waiting - whole)
