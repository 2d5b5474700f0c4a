"""`FullCollections`: runs Python's full garbage collections while the engine has no work.

A full collection (of generation 2) visits every object and every element of every list. With the counts and digests of a large KV
pool it takes 50 to 100 ms, and no stream of the worker goes on meanwhile. Python starts one after some hundred steps. Here Python
collects young objects alone, which takes about a millisecond; cycles among old ones wait for an idle moment.
"""

import gc
import time

AFTER_COLLECTIONS = 10  # of generation 1, as Python's own rule has it
NEVER = 2**31 - 1
IDLE_S = 0.5  # without work, before a collection runs: the next request mostly comes sooner or much later
BUSY_S = 600.0  # a worker that is never idle collects after this time


class FullCollections:
    """Decides when the engine's thread collects. With `by_engine` off, as where the process is not the worker's own, Python
    decides."""

    def __init__(self, *, by_engine: bool) -> None:
        self._by_engine = by_engine
        self._last_s = time.monotonic()
        if by_engine:
            gc.set_threshold(*gc.get_threshold()[:2], NEVER)

    @property
    def is_due(self) -> bool:
        """Return whether a collection is worth its time at an idle moment."""
        return self._by_engine and gc.get_count()[2] >= AFTER_COLLECTIONS

    @property
    def is_overdue(self) -> bool:
        """Return whether a collection must run although the engine has work."""
        return self._by_engine and time.monotonic() >= self._last_s + BUSY_S and self.is_due

    def run(self) -> None:
        """Collect all garbage."""
        gc.collect()
        self._last_s = time.monotonic()
