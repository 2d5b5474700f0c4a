"""Executes plans on several ranks, each in a process of its own: sends every plan to all ranks, and reads the results from rank 0.

All ranks run the same plans in the same order. With two steps in flight, the next plan is already at each rank when a step ends.

    start -> running -> (a rank is lost: all ranks are killed) -> restart -> running
                     -> (all ranks refuse a step: StepFailed)  -> running, in the next epoch

- epoch: how many steps have failed so far. A plan carries the epoch in which it was submitted; after a failed step, the ranks
  drop plans of the old epoch.
- lost rank: a rank that crashed, hung or contradicted the others. The others wait for it in their collectives, so all ranks are
  killed and started again together.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from transom_core.config import EngineConfig
from transom_core.errors import ConfigError, ModelError, OutOfMemory, RankLost, RequestError, StepFailed
from transom_worker.execution.executor import (
    Executor,
    ExecutorInfo,
    RankInfo,
    RankReport,
    RankUsage,
    ReadEnd,
    RemoteRead,
)
from transom_worker.execution.ranks.group import RankGroup
from transom_worker.execution.ranks.launcher import Launcher
from transom_worker.execution.ranks.messages import (
    BeginRead,
    BlocksDone,
    LoadAdapter,
    LoadsEnded,
    RankFailed,
    ReadBlocks,
    RunStep,
    WriteBlocks,
)
from transom_worker.execution.ranks.rank_startup import start_ranks
from transom_worker.execution.tiers.load_reports import LoadReports
from transom_worker.scheduling.step import StepPlan, StepResult

T = TypeVar("T")

# The longest time in start-up without a message from any rank; a rank that loads reports every second.
SILENCE_TIMEOUT_S = 120.0
# If every rank refuses a step, all refusals come within this time of the first one.
FAILURE_TIMEOUT_S = 10.0
# Added to the step timeout: time in which ranks that wait for a hanging rank can report which one it is.
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
        self._loss: RankLost | None = None  # from the loss of a rank until the next start
        self._pool_bytes: int | None = None
        self.ranks: tuple[RankInfo, ...] = ()  # of the last start
        self._usages: list[RankUsage] = []  # each rank's last report
        self._on_lost: Callable[[], None] = lambda: None
        self._on_read_end: Callable[[int, ReadEnd], None] = lambda rank, end: None
        # The error of a step that all ranks refused, which `receive` raises next.
        self._refused: Exception | None = None
        self._blocks: dict[int, BlocksDone] = {}  # by rank, of the present call
        self._load_reports = LoadReports(config.ranks.size)
        self._epoch = 0
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
        """Send one plan to all ranks. Raises RankLost.

        After a refusal that `receive` has yet to raise, the plan relies on a step that failed. So it is sent in that step's epoch,
        in which the ranks drop it.
        """
        self.check()
        assert self._group is not None
        if self._refused is not None:
            self._group.send_all(RunStep(self._epoch - 1, plan))
            return
        self._group.send_all(RunStep(self._epoch, plan))
        self._in_flight.append((plan.step_id, time.monotonic()))
        if not plan.seq_ids:
            self._without_rows[plan.step_id] = self._config.ranks.size

    def receive(self) -> StepResult:
        """Wait for the oldest plan's result.

        Raises:
            StepFailed: every rank refused the step before its first collective.  OutOfMemory: the same, because memory was short.
            RankLost: a rank died, hung, or failed alone.
        """
        if self._refused is not None and not self._results:
            refused, self._refused = self._refused, None
            raise refused
        if not self._in_flight and not self._results:
            raise StepFailed("A result was requested, but no plan was submitted.")
        return self._kill_if_lost(self._receive)

    def check(self) -> None:
        """Raise RankLost when a rank's process has ended; again if another call has met the loss, with its cause."""
        if (loss := self._loss) is not None:
            raise RankLost(f"The ranks are not running: {loss}", loss_cause=loss.loss_cause) from loss.__cause__
        if self._group is None:
            raise RankLost("The ranks are not running.")
        self._kill_if_lost(self._group.check)

    @property
    def lost(self) -> bool:
        """Return whether a rank was lost, and the ranks do not start again; any thread may read it."""
        group = self._group
        return group is not None and (group.lost or self._loss is not None)

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Call `callback`, on another thread, when `lost` becomes true."""
        self._on_lost = callback

    def drop_in_flight(self) -> None:
        """Forget the plans in flight. The ranks still run them, but the executor keeps only the ended loads of their results."""
        self._forget_plans()
        self._refused = None

    def read_blocks(self, tier: int, group: int, blocks: Sequence[int]) -> list[bytes]:
        """Return the contents of blocks of every rank, after the plans in flight. Raises ValueError, StepFailed, RankLost."""
        self._num_calls += 1
        return self._call([ReadBlocks(self._num_calls, tier, group, tuple(blocks))] * self._config.ranks.size)

    def write_blocks(self, tier: int, group: int, blocks: Sequence[int], data: Sequence[bytes]) -> None:
        """Write the contents of blocks of every rank, after the plans in flight. Raises ValueError, StepFailed, RankLost."""
        if len(data) != self._config.ranks.size:
            raise ValueError(f"blocks were given for {len(data)} ranks; there are {self._config.ranks.size}.")
        self._num_calls += 1
        ids = tuple(blocks)
        self._call([WriteBlocks(self._num_calls, tier, group, ids, part) for part in data])

    def load_adapter(self, slot: int, path: str) -> None:
        """Load a LoRA adapter on every rank, after the plans in flight. Raises RequestError, RankLost."""
        self._num_calls += 1
        try:
            self._call([LoadAdapter(self._num_calls, slot, path)] * self._config.ranks.size)
        except ValueError as refusal:
            raise RequestError(str(refusal), param="lora_path") from None

    def begin_read(self, read: RemoteRead) -> None:
        """Let every rank begin a read, after the plans in flight. Raises RankLost."""
        self.check()
        assert self._group is not None
        self._group.send_all(BeginRead(read))

    def on_read_end(self, callback: Callable[[int, ReadEnd], None]) -> None:
        """Have `callback` called by the engine's thread, while it handles messages."""
        self._on_read_end = callback

    def take_read_ends(self) -> None:
        """Handle the messages that have come. Raises RankLost."""
        self.check()
        while self._group is not None and self._group.has_message():
            self._take_message()

    def rank_reports(self) -> tuple[RankReport, ...]:
        """Return the last report of every rank of the last start; a rank reports its usage once a second while it works."""
        return tuple(RankReport(info=info, usage=usage) for info, usage in zip(self.ranks, self._usages, strict=True))

    def restart(self) -> ExecutorInfo:
        """Start all ranks again, with a KV pool of the same size. Raises RankLost."""
        self._close()
        return self._start()

    def reload(self, model: str) -> ExecutorInfo:
        """Start all ranks again with another checkpoint. Raises RankLost."""
        self._config = replace(self._config, model=replace(self._config.model, model=model))
        return self.restart()

    def interrupt(self) -> None:
        """Kill the ranks, even those that are being started, and make every later start fail too."""
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
        except RankLost as loss:
            self._loss = loss
            self._forget_plans()
            if self._group is not None:
                self._group.kill()
            raise

    def _start(self) -> ExecutorInfo:
        self._forget_steps()
        self._loss = None
        # The lambda looks `_on_lost` up when a rank is lost, because `on_lost` may set it after the start.
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
        """Return the oldest result; that of a step without rows only when every rank has done the step."""
        while True:
            if self._results and not self._without_rows.get(self._results[0].step_id):
                self._without_rows.pop(self._results[0].step_id, None)
                return self._load_reports.deliver(self._results.popleft())
            self._handle_message()

    def _handle_message(self) -> None:
        """Wait for the next message of any rank, and handle it.

        Raises:
            StepFailed, OutOfMemory: every rank refused the oldest step.  RankLost: a rank died, hung, or failed alone.
        """
        assert self._group is not None
        try:
            rank, message = self._group.receive(self._deadline_s())
        except RankLost as error:
            refusal = self._refusal() or error
            raise refusal from refusal.__cause__
        if isinstance(message, StepResult):
            self._step_done(message)
        elif isinstance(message, LoadsEnded):
            self._load_reports.add(message.loaded, message.load_s, message.failed)
            self._count_without_rows(message.step_id)
        elif isinstance(message, BlocksDone):
            if message.call == self._num_calls:
                self._blocks[rank] = message
        elif isinstance(message, ReadEnd):
            self._on_read_end(rank, message)
        elif isinstance(message, RankUsage):
            self._usages[rank] = message
        else:
            self._collect_failure(rank, message)

    def _step_done(self, result: StepResult) -> None:
        self._load_reports.add(result.loaded, result.load_s, result.failed)
        self._count_without_rows(result.step_id)
        if self._in_flight and result.step_id == self._in_flight[0][0]:
            self._in_flight.popleft()
            self._last_result_s = time.monotonic()
            self._results.append(result)

    def _count_without_rows(self, step_id: int) -> None:
        """Note that one more rank has done a step, if the step has no rows."""
        if step_id in self._without_rows:
            self._without_rows[step_id] -= 1

    def _call(self, messages: Sequence[ReadBlocks | WriteBlocks | LoadAdapter]) -> list[bytes]:
        """Send one message to each rank, and return the data of their answers in order of rank."""
        self.check()
        assert self._group is not None
        for rank, message in enumerate(messages):
            self._group.send(rank, message)
        self._blocks, self._call_sent_s = {}, time.monotonic()
        while len(self._blocks) < self._group.size:
            self._take_message()
        refusals = [answer.refusal for answer in self._blocks.values() if answer.refusal]
        if refusals:
            raise ValueError(refusals[0])
        return [self._blocks[rank].data for rank in range(self._group.size)]

    def _take_message(self) -> None:
        """Handle the next message outside of `receive`, which raises the refusal of a plan later. Raises RankLost."""
        try:
            self._kill_if_lost(self._handle_message)
        except RankLost:  # a subclass of StepFailed
            raise
        except (StepFailed, OutOfMemory) as error:
            self._refused = error

    def _deadline_s(self) -> float:
        """Return when to stop waiting for a message, on the monotonic clock.

        If some ranks have reported that the step failed, the others must report it within `FAILURE_TIMEOUT_S`. If none has, the
        oldest plan must be done within the step timeout, counted from when the rank could begin it.
        """
        if self._failures:
            return self._first_failure_s + FAILURE_TIMEOUT_S
        waits_since_s = self._in_flight[0][1] if self._in_flight else self._call_sent_s
        return max(waits_since_s, self._last_result_s) + self._config.ranks.step_timeout_s + HANG_GRACE_S

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
            self._without_rows.clear()
            kind = OutOfMemory if was_out_of_memory else StepFailed
            message = f"Step {failure.step_id} failed: {failure.error.message}"
            raise kind(message, loss_cause=failure.error.loss_cause or "exception")

    def _refusal(self) -> RankLost | None:
        """Return the error of a rank that refused a step which other ranks began; None if no rank refused.

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
        self._load_reports = LoadReports(self._config.ranks.size)
        # Step id -> ranks that have yet to do it, of steps without rows. These have no collectives that keep the ranks together.
        # Their result is delivered when all ranks have done them, so that an engine that polls for loads does not run ahead of a
        # slow rank.
        self._without_rows: dict[int, int] = {}
        self._results: deque[StepResult] = deque()  # results of the first rank that were not delivered yet
        self._blocks = {}
        self._refused = None
        self._num_calls = 0
        self._call_sent_s = 0.0
        self._failures: dict[int, RankFailed] = {}  # rank -> its refusal of the oldest step
        self._first_failure_s = 0.0

    def _forget_plans(self) -> None:
        self._in_flight.clear()
        self._results.clear()
        self._without_rows.clear()

    def _close(self) -> None:
        self._forget_plans()
        group, self._group = self._group, None
        if group is not None:
            group.close()
