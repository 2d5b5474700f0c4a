"""Waits until another rank has reached an operation, or raises once that rank's process has ended or a deadline has passed.

Each rank publishes two integers in shared memory: the number of its last operation (`ready`), and whether it has closed (`left`).
A wait first spins, then yields the core to other processes, then sleeps.
"""

from __future__ import annotations

import os
import select
import time

from transom_core.errors import RankLost

SPINS = 200  # a few microseconds: a rank that computes the same layer is rarely later
# Then each check yields the core, until this long after the start, but not longer: on a busy machine a yield may last for a whole
# time slice of another process.
YIELD_S = 2e-4
NAP_S = 2e-5  # then the time between checks, until NAPS_S after the start
NAPS_S = 20e-3
POLL_MS = 1  # the time between checks from then on


class Peer:
    """Another rank's process, and the indexes `ready` and `left` of its two integers in `integers`."""

    def __init__(self, rank: int, pid: int, integers: memoryview[int], *, ready: int, left: int) -> None:
        """Raise RankLost if there is no process `pid`."""
        self.name = f"Rank {rank} (process {pid})"
        self._integers, self._ready, self._left = integers, ready, left
        try:
            self._process = os.pidfd_open(pid)
        except ProcessLookupError:
            raise RankLost(f"{self.name} died while the ranks connected.") from None
        self._death = select.poll()
        self._death.register(self._process, select.POLLIN)

    def wait(self, target: int, timeout_s: float) -> None:
        """Wait until the rank has reached operation `target`.

        Raises:
            RankLost: the rank died, closed its communicator, or was later than `timeout_s`.
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
        """Close the process descriptor. Call it once."""
        os.close(self._process)

    def _raise_if_lost(self, target: int, waited_s: float, timeout_s: float) -> None:
        gone = self._integers[self._left] or self._death.poll(0)
        if gone and self._integers[self._ready] < target:  # it may have reached `target` and ended since the last check
            raise RankLost(
                f"{self.name} {'closed' if self._integers[self._left] else 'died'} while other ranks waited for it."
            )
        if waited_s > timeout_s:
            message = f"{self.name} was not ready within {timeout_s:g} s; it hangs or its step is too long."
            raise RankLost(message, loss_cause="hung")
