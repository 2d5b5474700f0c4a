"""The clock of a process's own events: seconds since the epoch that never jump.

Times of one process are subtracted from each other, for deadlines and measurements, and shown to people. The system's time of day
serves the second purpose alone: it jumps when an operator or NTP sets it. Times of two processes are never subtracted: hosts may
differ by any amount, so what crosses between routers and workers are durations (`contract.Request`).
"""

from __future__ import annotations

import time

_STARTED_S = time.time() - time.monotonic()


def steady_time_s() -> float:
    """Return the seconds since the epoch, as the time of day was when this process started and the monotonic clock has gone on."""
    return _STARTED_S + time.monotonic()
