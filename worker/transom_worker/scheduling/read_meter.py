"""`ReadMeter`: measures what reading a block from the disk tier costs (`kvcache.load_rates`), as `RateMeter` does for loads.

The measured rate is a moving average; the cache gets a new one only when it is off by more than a quarter. Reads are measured only
where they are made, and they are made where they look cheap. So that a disk that was slow once is tried again, the estimate decays
while requests come and none is read for; the next measurement then weighs more.
"""

from __future__ import annotations

from collections.abc import Sequence

from transom_core.kv_cache.load_rates import LoadRates

WEIGHT = 0.3  # of the newest measurement in the moving average
STEP = 1.25  # rates change when they are off by this factor
STALE_REQUESTS = 16  # without a read, after which the estimate decays
DECAY = 0.8
MOST_DECAYS = 12  # to 7 % of what was measured


class ReadMeter:
    """Learns from loads from the disk; `block_bytes` are a block's bytes by group."""

    def __init__(self, block_bytes: Sequence[int]) -> None:
        self._block_bytes = block_bytes
        self._byte_ns = 0.0  # 0: not measured
        self._num_requests = 0  # without a read, since the last read or decay
        self._num_decays = 0  # since the last read

    def read(self, num_blocks: Sequence[int], elapsed_s: float) -> None:
        """Learn from a load of `num_blocks` blocks, by group."""
        num_bytes = sum(count * size for count, size in zip(num_blocks, self._block_bytes, strict=True))
        if elapsed_s <= 0 or not num_bytes:
            return
        weight = 1 - (1 - WEIGHT) ** (1 + self._num_decays) if self._byte_ns else 1.0
        self._byte_ns += weight * (elapsed_s * 1e9 / num_bytes - self._byte_ns)
        self._num_requests = self._num_decays = 0

    def not_read(self) -> None:
        """Note that a request came for which nothing is read."""
        self._num_requests += 1
        if self._num_requests == STALE_REQUESTS:
            self._num_requests = 0
            if self._num_decays < MOST_DECAYS:
                self._num_decays += 1
                self._byte_ns *= DECAY

    def next_rates(self, present: LoadRates) -> LoadRates | None:
        """Return the rates that should hold instead of the present ones; None if those are near enough."""
        read_ns = tuple(
            self._near(ns, self._byte_ns * size) for ns, size in zip(present.read_ns, self._block_bytes, strict=True)
        )
        return None if read_ns == present.read_ns else present._replace(read_ns=read_ns)

    def _near(self, present_ns: int, measured_ns: float) -> int:
        is_near = present_ns / STEP <= measured_ns <= present_ns * STEP
        return present_ns if not measured_ns or is_near else max(1, round(measured_ns))
