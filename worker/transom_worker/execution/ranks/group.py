"""The ranks of one start, as their executor sees them: their processes, the channel to them, and what goes wrong first."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transom_worker.config import EngineConfig
from transom_worker.errors import RankLost
from transom_worker.execution.ranks.channel import ExecutorChannel
from transom_worker.execution.ranks.launcher import Launcher
from transom_worker.execution.ranks.messages import RankFailed, RankSetup
from transom_worker.logs import process_name

LAST_WORDS_S = 1.0  # a lost rank shows in several ways at once; whoever knows the cause may say so until then


class RankGroup:
    """Running ranks. One thread uses it; `on_lost` is called on another one when a process ends."""

    def __init__(self, config: EngineConfig, launcher: Launcher, on_lost: Callable[[], None]) -> None:
        """Starts the processes.

        Raises:
            RankLost: one cannot be started.  ConfigError: there is not room for all of them.
        """
        self.size = config.ranks.size
        self._launcher, self._on_lost = launcher, on_lost
        self._ended: str | None = None  # the first rank that ended
        self._struck: str | None = None  # the first that could not say why, and how it ended
        self._silent: set[int] = set()  # ranks that ended so, of which no word comes any more
        self._interrupted = False
        self._channel = ExecutorChannel(launcher.ip)
        channel = self._channel
        worker = process_name().removeprefix("worker/") or "0"
        first = RankSetup(
            config=config,
            rank=0,
            size=self.size,
            endpoint=channel.endpoint,
            server_key=channel.server_key,
            worker=worker,
        )
        setups = [replace(first, rank=rank) for rank in range(self.size)]
        try:
            launcher.launch(setups, self._rank_ended)
        except BaseException:
            self.close()
            raise

    @property
    def lost(self) -> bool:
        """Whether a rank's process has ended; from any thread."""
        return self._ended is not None

    def send(self, rank: int, message: object) -> None:
        """Hand a message to one rank."""
        self._channel.send(rank, message)

    def send_all(self, message: object) -> None:
        """Hand one message to all ranks."""
        self._channel.send_all(self.size, message)

    def receive(self, deadline_s: float) -> tuple[int, Any]:
        """The next message and who sent it; a failed step is one of them. `deadline_s` is of the monotonic clock.

        Raises:
            RankLost: a rank ended, lost its peers, or the time is over. A rank's own reason to end is the error's cause.
        """
        while True:
            found = self._channel.receive(deadline_s - time.monotonic())
            if found is not None:
                if isinstance(found[1], RankFailed) and found[1].step_id is None:
                    raise self._lost_by(found)
                return found
            self.check()
            if time.monotonic() > deadline_s:
                raise RankLost("The ranks did not answer in time: one of them hangs.")

    def check(self) -> None:
        """Raises RankLost as `receive` does if a rank's process has ended."""
        if self._ended is not None:
            raise self._lost_by(None)

    def kill(self) -> None:
        """End all processes at once. Only `close` is of use then."""
        self._launcher.kill()

    def interrupt(self, reason: str) -> None:
        """End all processes, and have whoever waits for them raise RankLost with this reason; from any thread."""
        self._ended, self._interrupted = self._ended or reason, True
        try:
            self._launcher.kill()
        finally:
            self._channel.wake()

    def close(self) -> None:
        """End all processes, wait until they are gone, and close the channel; idempotent."""
        try:
            self._launcher.kill()
            self._launcher.close()
        finally:
            self._channel.close()

    def _rank_ended(self, rank: int, how: str | None) -> None:
        if how is not None:
            self._struck = self._struck or f"Rank {rank} of {self.size}: {how}"
            self._silent.add(rank)
        self._ended = self._ended or self._struck or f"Rank {rank} of {self.size} ended."
        self._channel.wake()
        self._on_lost()

    def _lost_by(self, found: tuple[int, Any] | None) -> RankLost:
        """The error for the last words of a rank, or for its end without any; others may know better than that a peer left."""
        until_s = time.monotonic() + LAST_WORDS_S
        words: tuple[int, RankFailed] | None = None
        spoken: set[int] = set()
        while not self._interrupted:
            if found is not None and isinstance(found[1], RankFailed):
                words = found
                spoken.add(found[0])
                if found[1].error.kind != RankLost.__name__:
                    break
            left_s = until_s - time.monotonic()
            if left_s <= 0 or len(spoken | self._silent) == self.size:
                break
            found = self._channel.receive(left_s)
        if words is None or (self._struck and words[1].error.kind == RankLost.__name__):
            return RankLost(self._struck or self._ended)
        rank, failed = words
        cause = failed.error.error()
        lost = RankLost(f"Rank {rank} of {self.size}: {cause}")
        lost.__cause__ = type(cause)(str(lost))
        return lost
