"""Keeps the ranks of one start for their executor: the processes, the connection to them, and why the first of them was lost.

The loss of a rank shows in up to three ways, in any order: its process exits without a report; its own last message gives the
reason (`RankFailed` with an error other than RankLost); the other ranks report RankLost, because a collective with it failed. The
group waits up to `FAILURE_REPORT_WINDOW_S` for these signs, and raises the most informative one: the rank's own reason, else how
its process exited, else the report of another rank.
"""

import time
from collections.abc import Callable
from typing import Any

from transom_core.config import EngineConfig
from transom_core.errors import RankLost
from transom_core.logs import process_name
from transom_worker.execution.ranks.channel import ExecutorChannel
from transom_worker.execution.ranks.launcher import Launcher, RankExit
from transom_worker.execution.ranks.messages import RankFailed, RankSetup

FAILURE_REPORT_WINDOW_S = 1.0  # how long the group waits for further reports after the first sign of a lost rank


class RankGroup:
    """Running ranks. One thread uses the group; the group calls `on_lost` on another thread when a rank's process ends."""

    def __init__(self, config: EngineConfig, launcher: Launcher, on_lost: Callable[[], None]) -> None:
        """Start the processes.

        Raises:
            RankLost: a process cannot be started.  ConfigError: the host or the placement group has no place for all of them.
        """
        self.size = config.ranks.size
        self._launcher, self._on_lost = launcher, on_lost
        self._ended: str | None = None  # how the first rank ended
        self._unexplained_exit: RankExit | None = None  # how the first rank without a report ended
        self._silent_ranks: set[int] = set()  # ranks that ended without a report, and will send none
        self._interrupted = False
        self._channel = ExecutorChannel(launcher.ip)
        channel = self._channel
        worker = process_name().removeprefix("worker/") or "0"
        setups = [
            RankSetup(
                config=config,
                rank=rank,
                size=self.size,
                endpoint=channel.endpoint,
                server_key=channel.server_key,
                worker=worker,
            )
            for rank in range(self.size)
        ]
        try:
            launcher.launch(setups, self._rank_exited)
        except BaseException:
            self.close()
            raise

    @property
    def lost(self) -> bool:
        """Return whether a rank's process has ended; any thread may read it."""
        return self._ended is not None

    def send(self, rank: int, message: object) -> None:
        """Send a message to one rank."""
        self._channel.send(rank, message)

    def send_all(self, message: object) -> None:
        """Send one message to all ranks."""
        self._channel.send_all(self.size, message)

    def receive(self, deadline_s: float) -> tuple[int, Any]:
        """Return the next message and its rank; the message may report a failed step. `deadline_s` is a time on the monotonic
        clock.

        Raises:
            RankLost: a rank ended, a rank lost its peers, or no message came before the deadline. If a rank
                reported its own reason, that is the error's cause.
        """
        while True:
            received = self._channel.receive(deadline_s - time.monotonic())
            if received is not None:
                if isinstance(received[1], RankFailed) and received[1].step_id is None:
                    raise self._lost_error(received)
                return received
            self.check()
            if time.monotonic() > deadline_s:
                raise RankLost("The ranks did not answer in time: one of them hangs.", loss_cause="hung")

    def has_message(self) -> bool:
        """Return whether `receive` would return at once."""
        return self._channel.has_message()

    def check(self) -> None:
        """Raise RankLost, as `receive` does, if a rank's process has ended."""
        if self._ended is not None:
            raise self._lost_error(None)

    def kill(self) -> None:
        """Kill all processes at once. After that, only `close` may be called."""
        self._launcher.kill()

    def interrupt(self, reason: str) -> None:
        """Kill all processes, and make a thread that waits for them raise RankLost with this reason; any thread may call this."""
        self._ended, self._interrupted = self._ended or reason, True
        try:
            self._launcher.kill()
        finally:
            self._channel.wake()

    def close(self) -> None:
        """Kill all processes, wait until they are gone, and close the connection; idempotent."""
        try:
            self._launcher.kill()
            self._launcher.close()
        finally:
            self._channel.close()

    def _rank_exited(self, rank: int, end: RankExit | None) -> None:
        """Note that a rank's process has ended; `end` is None if the rank has reported a reason. The launcher calls this."""
        words = f"Rank {rank} of {self.size} ended."
        if end is not None:
            words = f"Rank {rank} of {self.size}: {end.how}"
            self._unexplained_exit = self._unexplained_exit or RankExit(words, end.cause)
            self._silent_ranks.add(rank)
        self._ended = self._ended or words
        self._channel.wake()
        self._on_lost()

    def _lost_error(self, received: tuple[int, Any] | None) -> RankLost:
        """Collect reports until one gives the reason, all ranks have reported or ended, or the time is over; return the error for
        the lost rank.

        `received` is the report that was received first, if there is one.
        """
        until_s = time.monotonic() + FAILURE_REPORT_WINDOW_S
        report: tuple[int, RankFailed] | None = None
        reported_ranks: set[int] = set()
        while not self._interrupted:
            if received is not None and isinstance(received[1], RankFailed):
                report = received
                reported_ranks.add(received[0])
                if received[1].error.kind != RankLost.__name__:
                    break
            is_explained = self._unexplained_exit is not None  # then read only the reports that have come already
            remaining_s = 0.0 if is_explained else until_s - time.monotonic()
            if remaining_s < 0 or len(reported_ranks | self._silent_ranks) == self.size:
                break
            received = self._channel.receive(remaining_s)
            if received is None and is_explained:
                break
        if self._unexplained_exit and (report is None or report[1].error.kind == RankLost.__name__):
            return RankLost(self._unexplained_exit.how, loss_cause=self._unexplained_exit.cause)
        if report is None:
            return RankLost(self._ended)
        rank, failed = report
        cause = failed.error.error()
        lost = RankLost(f"Rank {rank} of {self.size}: {cause}", loss_cause=failed.error.loss_cause or "unknown")
        lost.__cause__ = type(cause)(str(lost))
        return lost
