"""The clock of a process's own events: seconds since the epoch that never jump.

A process subtracts its times from each other (deadlines, measurements) and shows them to people (logs, timelines). The system's
time of day is good only for showing, since it jumps when an operator or NTP sets it. Times of two processes are never subtracted:
the clocks of their hosts may differ by any amount, so routers and workers send each other durations (`contract.Request`).
"""

import time

_STARTED_S = time.time() - time.monotonic()


def steady_time_s() -> float:
    """Return seconds since the epoch: the time of day when this process started, plus what the monotonic clock has counted
    since."""
    return _STARTED_S + time.monotonic()
