"""Several ranks, each a process of its own: plans go to all of them, results come from the first.

All ranks run the same plans in the same order, one after another, so that with two steps in flight the next plan lies ready when
a step ends. Whatever happens to one rank happens to all: they are ended, and started again together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from transom_worker.config import EngineConfig
from transom_worker.errors import ConfigError, ModelError, RankLost, StepFailed
from transom_worker.execution.executor import Executor, ExecutorInfo, RankInfo, RankReport, RankUsage
from transom_worker.execution.ranks.group import RankGroup
from transom_worker.execution.ranks.launcher import Launcher
from transom_worker.execution.ranks.messages import RankFailed, RankUsed, RunStep, StepDone
from transom_worker.execution.ranks.startup import start_ranks
from transom_worker.scheduling.step import StepPlan, StepResult

T = TypeVar("T")

SILENCE_TIMEOUT_S = 120.0  # in start-up, without a word from any rank: those that load tell of it every second
FAILURE_TIMEOUT_S = 10.0  # within which a step that failed on one rank has failed on all, if it is the same failure
HANG_GRACE_S = (
    5.0  # after a step's time is over: ranks that wait for one another say which of them hangs, if they get to run
)
INTERRUPTED = "The start of the ranks was interrupted: their worker shuts down."


class RanksExecutor(Executor):
    """Owns the ranks of one worker. `make_launcher` gives a launcher for each start."""

    def __init__(
        self,
        config: EngineConfig,
        make_launcher: Callable[[], Launcher],
        *,
        silence_timeout_s: float = SILENCE_TIMEOUT_S,
    ) -> None:
        self._config, self._make_launcher, self._silence_timeout_s = config, make_launcher, silence_timeout_s
        self._group: RankGroup | None = None
        self._starting: RankGroup | None = None
        self._interrupted = False
        self._killed = False  # after a loss, until the next start
        self._pool_bytes: int | None = None
        self.ranks: tuple[RankInfo, ...] = ()  # of the last start
        self._usages: list[RankUsage] = []  # by rank, as last told
        self._on_lost: Callable[[], None] = lambda: None
        self._forget_steps()

    def start(self) -> ExecutorInfo:
        """Start all ranks, load, agree on an arena.

        Raises:
            ConfigError, ModelError: settings or checkpoint are wrong; names the rank.  RankLost: a rank died or hung.
        """
        try:
            return self._start()
        except RankLost as error:
            if isinstance(error.__cause__, ConfigError | ModelError):
                raise error.__cause__ from None
            raise

    def submit(self, plan: StepPlan) -> None:
        """Send one plan to all ranks. Raises RankLost."""
        self.check()
        assert self._group is not None
        try:
            self._group.send_all(RunStep(self._epoch, plan))
        except BaseException:  # such as an interrupt: some ranks may have the plan and others not
            self._kill()
            raise
        self._in_flight.append((plan.step_id, time.monotonic()))

    def receive(self) -> StepResult:
        """Wait for the oldest plan's result. Raises StepFailed, and RankLost when a rank died, hung or went its own way."""
        if not self._in_flight:
            raise StepFailed("A result was asked for, but no plan is waiting.")
        return self._kill_if_lost(self._receive)

    def check(self) -> None:
        """Raises RankLost when a rank has ended since it was last heard of."""
        if self._group is None or self._killed:
            raise RankLost("The ranks are not running.")
        self._kill_if_lost(self._group.check)

    @property
    def lost(self) -> bool:
        """Whether a rank has ended by itself; from any thread."""
        group = self._group
        return group is not None and group.lost and not self._killed

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, on another thread, when `lost` becomes true."""
        self._on_lost = callback

    def drop_in_flight(self) -> None:
        """Ranks run what they have been sent; their results are thrown away."""
        self._in_flight.clear()

    def rank_reports(self) -> tuple[RankReport, ...]:
        """Every rank of the last start; a rank tells of itself once a second while it works."""
        return tuple(RankReport(info=info, usage=usage) for info, usage in zip(self.ranks, self._usages, strict=True))

    def restart(self) -> ExecutorInfo:
        """Start all ranks again, with the pool that they had. Raises RankLost."""
        self._close()
        return self._start()

    def interrupt(self) -> None:
        """Kill the ranks that are being started, now and ever after."""
        self._interrupted = True
        group = self._starting
        if group is not None:
            group.interrupt(INTERRUPTED)

    def shutdown(self) -> None:
        """End all ranks; idempotent."""
        self._close()

    def _kill_if_lost(self, action: Callable[[], T]) -> T:
        """What `action` gives; with one rank all of them go, at once. The next start waits until they are gone."""
        try:
            return action()
        except RankLost:
            self._kill()
            raise

    def _kill(self) -> None:
        self._killed = True
        self._in_flight.clear()
        if self._group is not None:
            self._group.kill()

    def _start(self) -> ExecutorInfo:
        self._forget_steps()
        self._killed = False
        self._starting = group = RankGroup(self._config, self._make_launcher(), lambda: self._on_lost())
        try:
            if self._interrupted:
                raise RankLost(INTERRUPTED)
            info, self._pool_bytes = start_ranks(group, timeout_s=self._silence_timeout_s, pool_bytes=self._pool_bytes)
        except BaseException:
            group.close()
            raise
        finally:
            self._starting = None
        self._group, self.ranks = group, info.ranks
        self._usages = [RankUsage() for _ in info.ranks]
        return info

    def _receive(self) -> StepResult:
        assert self._group is not None
        while True:
            try:
                rank, message = self._group.receive(self._deadline_s())
            except RankLost as error:
                raise self._failed_alone() or error from error.__cause__
            if isinstance(message, StepDone):
                if self._in_flight and message.result.step_id == self._in_flight[0][0]:
                    self._in_flight.popleft()
                    self._answered_s = time.monotonic()
                    return message.result
            elif isinstance(message, RankUsed):
                self._usages[rank] = message.usage
            else:
                self._failed(rank, message)

    def _deadline_s(self) -> float:
        """When the oldest step is too late; a step that failed on some ranks must soon have failed on the others."""
        if self._failures:
            return self._failed_s + FAILURE_TIMEOUT_S
        return max(self._in_flight[0][1], self._answered_s) + self._config.ranks.step_timeout_s + HANG_GRACE_S

    def _failed(self, rank: int, failed: RankFailed) -> None:
        """A step that failed on every rank before they did anything together leaves them as they were."""
        assert self._group is not None
        if not self._failures:
            self._failed_s = time.monotonic()
        self._failures[rank] = failed
        if len(self._failures) < self._group.size:
            return
        self._failures.clear()
        self._epoch += 1
        if self._in_flight:
            self._in_flight.clear()
            raise StepFailed(f"Step {failed.step_id} failed: {failed.error.message}")

    def _failed_alone(self) -> RankLost | None:
        """What a rank said that refused a step which others began: they can only say that they waited for it."""
        if not self._failures:
            return None
        rank, failed = next(iter(self._failures.items()))
        return RankLost(f"Rank {rank} of {self._config.ranks.size}: {failed.error.message}")

    def _forget_steps(self) -> None:
        self._in_flight: deque[tuple[int, float]] = deque()  # step ids, and when they were submitted
        self._answered_s = 0.0
        self._epoch = 0  # steps that have failed
        self._failures: dict[int, RankFailed] = {}  # of the step that fails now, by rank
        self._failed_s = 0.0

    def _close(self) -> None:
        self._in_flight.clear()
        group, self._group = self._group, None
        if group is not None:
            group.close()
