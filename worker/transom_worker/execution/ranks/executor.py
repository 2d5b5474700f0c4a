"""The executor of several ranks, each in a process of its own: it sends every plan to all ranks, and reads the results from
rank 0.

All ranks run the same plans in the same order. With two steps in flight, the next plan waits at each rank when a step ends.

    start -> running -> (a rank is lost: all ranks are killed) -> restart -> running
                     -> (all ranks refuse a step: StepFailed)  -> running, in the next epoch

- epoch: how many steps have failed so far. A plan carries the epoch in which it was submitted; after a failed step, the ranks
  drop plans of the old epoch.
- lost rank: a rank that crashed, hung or contradicted the others. The others wait for it in their collectives, so all ranks are
  killed and started again together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from transom_worker.config import EngineConfig
from transom_worker.errors import ConfigError, ModelError, OutOfMemory, RankLost, StepFailed
from transom_worker.execution.executor import Executor, ExecutorInfo, RankInfo, RankReport, RankUsage
from transom_worker.execution.ranks.group import RankGroup
from transom_worker.execution.ranks.launcher import Launcher
from transom_worker.execution.ranks.messages import RankFailed, RankUsed, RunStep, StepDone
from transom_worker.execution.ranks.startup import start_ranks
from transom_worker.scheduling.step import StepPlan, StepResult

T = TypeVar("T")

SILENCE_TIMEOUT_S = (
    120.0  # longest time in start-up without a message from any rank; a rank that loads reports every second
)
FAILURE_TIMEOUT_S = (
    10.0  # a step that every rank refuses has been refused by all ranks within this time of the first refusal
)
# Added to the step timeout: ranks that wait for a hanging rank report which one it is, and need time to run for that.
HANG_GRACE_S = 5.0
INTERRUPTED = "The ranks were interrupted: their worker ends."


class RanksExecutor(Executor):
    """The executor of the ranks of one worker. Each start launches them with a new launcher from `make_launcher`."""

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
        self._killed = False  # true from the loss of a rank until the next start
        self._pool_bytes: int | None = None
        self.ranks: tuple[RankInfo, ...] = ()  # of the last start
        self._usages: list[RankUsage] = []  # each rank's last report
        self._on_lost: Callable[[], None] = lambda: None
        self._forget_steps()

    def start(self) -> ExecutorInfo:
        """Start all ranks, load the model, and agree on an arena.

        Raises:
            ConfigError, ModelError: settings or checkpoint are wrong; the message names the rank.  RankLost: a rank died or hung.
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
        except BaseException:  # such as an interrupt: some ranks may have received the plan, and others not
            self._kill()
            raise
        self._in_flight.append((plan.step_id, time.monotonic()))

    def receive(self) -> StepResult:
        """Wait for the oldest plan's result.

        Raises:
            StepFailed: every rank refused the step before its first collective.  OutOfMemory: so, for want of memory.
            RankLost: a rank died, hung, or failed alone.
        """
        if not self._in_flight:
            raise StepFailed("A result was requested, but no plan was submitted.")
        return self._kill_if_lost(self._receive)

    def check(self) -> None:
        """Raise RankLost when a rank's process has ended."""
        if self._group is None or self._killed:
            raise RankLost("The ranks are not running.")
        self._kill_if_lost(self._group.check)

    @property
    def lost(self) -> bool:
        """Whether a rank's process has ended by itself; any thread may read it."""
        group = self._group
        return group is not None and group.lost and not self._killed

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call `callback`, on another thread, when `lost` becomes true."""
        self._on_lost = callback

    def drop_in_flight(self) -> None:
        """Forget the plans in flight: the ranks still run them, and the executor ignores their results."""
        self._in_flight.clear()

    def rank_reports(self) -> tuple[RankReport, ...]:
        """Return the last report of every rank of the last start; a rank reports its usage once a second while it works."""
        return tuple(RankReport(info=info, usage=usage) for info, usage in zip(self.ranks, self._usages, strict=True))

    def restart(self) -> ExecutorInfo:
        """Start all ranks again, with a KV pool of the same size. Raises RankLost."""
        self._close()
        return self._start()

    def interrupt(self) -> None:
        """Kill the ranks, also those that are being started, and make every later start fail too."""
        self._interrupted = True
        group = self._starting or self._group
        if group is not None:
            group.interrupt(INTERRUPTED)

    def shutdown(self) -> None:
        """Kill all ranks and wait until they are gone; idempotent."""
        self._close()

    def _kill_if_lost(self, action: Callable[[], T]) -> T:
        """Call `action`, and kill all ranks if it raises RankLost. The next start waits until they are gone."""
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
                refusal = self._refusal() or error
                raise refusal from refusal.__cause__
            if isinstance(message, StepDone):
                if self._in_flight and message.result.step_id == self._in_flight[0][0]:
                    self._in_flight.popleft()
                    self._last_result_s = time.monotonic()
                    return message.result
            elif isinstance(message, RankUsed):
                self._usages[rank] = message.usage
            else:
                self._collect_failure(rank, message)

    def _deadline_s(self) -> float:
        """When to stop waiting for a message.

        If some ranks have reported that the step failed, the others must report it within `FAILURE_TIMEOUT_S`. Otherwise the
        oldest plan must be done within the step timeout, counted from when the rank could begin it.
        """
        if self._failures:
            return self._first_failure_s + FAILURE_TIMEOUT_S
        return max(self._in_flight[0][1], self._last_result_s) + self._config.ranks.step_timeout_s + HANG_GRACE_S

    def _collect_failure(self, rank: int, failure: RankFailed) -> None:
        """Note that a rank refused the oldest step; once all ranks have, raise StepFailed.

        A step that fails on every rank before its first collective leaves all ranks as they were, so that they can run later
        steps.
        """
        assert self._group is not None
        if not self._failures:
            self._first_failure_s = time.monotonic()
        self._failures[rank] = failure
        if len(self._failures) < self._group.size:
            return
        was_out_of_memory = any(one.error.kind == OutOfMemory.__name__ for one in self._failures.values())
        self._failures.clear()
        self._epoch += 1
        if self._in_flight:
            self._in_flight.clear()
            kind = OutOfMemory if was_out_of_memory else StepFailed
            message = f"Step {failure.step_id} failed: {failure.error.message}"
            raise kind(message, loss_cause=failure.error.loss_cause or "exception")

    def _refusal(self) -> RankLost | None:
        """Return the error of a rank that refused a step which other ranks began; None where no rank refused.

        The other ranks can only report that they waited for that rank, so its own message is the better reason.
        """
        if not self._failures:
            return None
        rank, failure = next(iter(self._failures.items()))
        words = f"Rank {rank} of {self._config.ranks.size}: {failure.error.message}"
        lost = RankLost(words, loss_cause=failure.error.loss_cause or "unknown")
        lost.__cause__ = failure.error.error()
        return lost

    def _forget_steps(self) -> None:
        self._in_flight: deque[tuple[int, float]] = deque()  # step ids, and when they were submitted
        self._last_result_s = 0.0  # when the last result arrived
        self._epoch = 0
        self._failures: dict[int, RankFailed] = {}  # refusals of the oldest step, by rank
        self._first_failure_s = 0.0

    def _close(self) -> None:
        self._in_flight.clear()
        group, self._group = self._group, None
        if group is not None:
            group.close()
