"""Waiting for another rank's integer to rise, as long as its process lives and a deadline has not passed."""

from __future__ import annotations

import os
import select
import time

from transom_worker.errors import RankLost

SPINS = 200  # some microseconds: a peer that computes the same is seldom later
YIELD_S = 2e-4  # then others may run in between; on a full machine each yield costs a turn, so not for long
NAP_S = 2e-5  # then the core is left alone
NAPS_S = 20e-3
POLL_MS = 1


class Peer:
    """Another rank's process. `ready` and `left` are the places of its two integers among `integers`: how far it is, and
    whether it went."""

    def __init__(self, rank: int, pid: int, integers: memoryview[int], *, ready: int, left: int) -> None:
        """Raises RankLost when there is no such process."""
        self.name = f"Rank {rank} (process {pid})"
        self._integers, self._ready, self._left = integers, ready, left
        try:
            self._process = os.pidfd_open(pid)
        except ProcessLookupError:
            raise RankLost(f"{self.name} died while the ranks met.") from None
        self._death = select.poll()
        self._death.register(self._process, select.POLLIN)

    def wait(self, target: int, timeout_s: float) -> None:
        """Until the peer's integer reaches `target`.

        Raises:
            RankLost: it died, left or did not come in time.
        """
        integers, ready = self._integers, self._ready
        for _ in range(SPINS):
            if integers[ready] >= target:
                return
        start = now = time.monotonic()
        while integers[ready] < target:
            self._raise_if_lost(target, now - start, timeout_s)
            if now - start < YIELD_S:
                os.sched_yield()
            elif now - start < NAPS_S:
                time.sleep(NAP_S)
            else:
                self._death.poll(POLL_MS)
            now = time.monotonic()

    def close(self) -> None:
        """Give its descriptor back; once."""
        os.close(self._process)

    def _raise_if_lost(self, target: int, waited_s: float, timeout_s: float) -> None:
        gone = self._integers[self._left] or self._death.poll(0)
        if gone and self._integers[self._ready] < target:  # it may have come and gone between two looks
            raise RankLost(
                f"{self.name} {'left' if self._integers[self._left] else 'died'} while others waited for it."
            )
        if waited_s > timeout_s:
            raise RankLost(f"{self.name} did not come within {timeout_s:g} s; it hangs or its step is too long.")
