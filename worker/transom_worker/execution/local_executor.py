"""Runs the only rank of a worker in the engine's own process."""

import gc
import os
import platform
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from transom_core.config import EngineConfig
from transom_core.errors import OutOfMemory, StepFailed
from transom_core.machine.host_memory import freeze_objects
from transom_core.model_files.content import join_parts
from transom_worker.execution.executor import Executor, ExecutorInfo, RankInfo, RankReport, ReadEnd, RemoteRead
from transom_worker.execution.loss_causes import cause_of_error
from transom_worker.execution.runner import LaunchedStep, ModelRunner
from transom_worker.execution.setup.load_progress import compile_progress
from transom_worker.execution.setup.model_loading import LoadedModel
from transom_worker.execution.setup.model_setup import ModelSetup
from transom_worker.execution.tiers.load_reports import LoadReports
from transom_worker.scheduling.step import StepPlan, StepResult


class LocalExecutor(Executor):
    """Launches plans on the calling thread.

        submit      plan -> `_plans`
        launch      `_plans` -> `ModelRunner.launch` -> `_launched`
        receive     `_launched` -> `ModelRunner.finish` -> result

    On a GPU, `submit` launches the plan at once. A CPU computes a plan when it is launched, so there `receive` launches it, unless
    a call that reads or writes blocks has launched it before.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel | None = None) -> None:
        """Create an executor for the model that the config names, or for `loaded` instead."""
        self._config = config
        self._loaded = loaded
        self._runner: ModelRunner | None = None
        self._pool_bytes: int | None = None  # known after the first start
        self._plans: deque[StepPlan] = deque()
        self._launched: deque[LaunchedStep | Exception] = deque()  # launched plans, or the error of one that failed
        self._has_failed = False  # the last of `_launched` is an error; plans after it are dropped
        self._load_reports = LoadReports(num_ranks=1)
        self._on_read_end: Callable[[int, ReadEnd], None] = lambda rank, end: None

    def start(self) -> ExecutorInfo:
        """Load the model, size and allocate the arena, and warm up.

        Raises:
            ConfigError: the model or the memory cannot meet the settings.  ModelError: the model cannot be loaded.
        """
        setup = ModelSetup(self._config, loaded=self._loaded)
        with compile_progress():
            self._pool_bytes = self._pool_bytes or setup.pool_bytes()
            self._runner = setup.allocate(self._pool_bytes, join_parts(setup.contents))
        self._runner.tiers.on_read_end(lambda end: self._on_read_end(0, end))
        return self._runner.info

    def reload(self, model: str) -> ExecutorInfo:
        """Load another checkpoint's weights after those that are loaded were freed. Raises ModelError."""
        self.shutdown()
        was_frozen = gc.get_freeze_count() > 0
        gc.unfreeze()  # the old model is among what the worker froze after its start
        gc.collect()
        self._config = replace(self._config, model=replace(self._config.model, model=model))
        info = self.start()
        if was_frozen:
            freeze_objects()
        return info

    def submit(self, plan: StepPlan) -> None:
        """Launch one plan if the device computes while the host goes on; else queue it."""
        if self._runner is None:
            raise StepFailed("A plan was submitted to an executor that is not running.")
        self._plans.append(plan)
        if self._runner.runs_ahead:
            self._launch_queued()

    def receive(self) -> StepResult:
        """Wait for the result of the oldest plan. If it failed, raise StepFailed (OutOfMemory if memory was short) and drop the
        later plans."""
        if not self._launched:
            self._launch_oldest()
        oldest = self._launched.popleft()
        if isinstance(oldest, Exception):
            self._has_failed = False
            raise oldest
        assert self._runner is not None
        try:
            result = self._runner.finish(oldest)
        except Exception as error:
            self.drop_in_flight()
            raise _reported(oldest.plan, error) from error
        self._load_reports.add(result.loaded, result.load_s, result.failed)
        return self._load_reports.deliver(result)

    def read_blocks(self, tier: int, group: int, blocks: Sequence[int]) -> list[bytes]:
        """Return the contents of blocks after the queued plans, which are launched first."""
        return [self._runner_after_plans().tiers.read(tier, group, blocks)]

    def write_blocks(self, tier: int, group: int, blocks: Sequence[int], data: Sequence[bytes]) -> None:
        """Write the contents of blocks after the queued plans, which are launched first."""
        (own,) = data
        self._runner_after_plans().tiers.write(tier, group, blocks, own)

    def load_adapter(self, slot: int, path: str) -> None:
        """Load a LoRA adapter after the queued plans, which are launched first."""
        self._runner_after_plans().load_adapter(slot, path)

    def begin_read(self, read: RemoteRead) -> None:
        """Begin a read after the queued plans, which are launched first."""
        self._runner_after_plans().tiers.begin_read(read)

    def on_read_end(self, callback: Callable[[int, ReadEnd], None]) -> None:
        """Have `callback` called on the thread of the reads."""
        self._on_read_end = callback

    def _runner_after_plans(self) -> ModelRunner:
        if self._runner is None:
            raise StepFailed("Blocks or adapters were asked of an executor that is not running.")
        self._launch_queued()
        return self._runner

    def _launch_queued(self) -> None:
        while self._plans:
            self._launch_oldest()

    def _launch_oldest(self) -> None:
        """Launch the oldest plan; keep what was launched, or why it failed, for `receive`."""
        if self._runner is None or not self._plans:
            raise StepFailed("A result was requested, but no plan was submitted.")
        if self._has_failed:
            self._abandon_plans()
            return
        plan = self._plans.popleft()
        try:
            self._launched.append(self._runner.launch(plan))
        except Exception as error:
            self._has_failed = True
            self._launched.append(_reported(plan, error))
            self._runner.abandon(plan)
            self._abandon_plans()

    def drop_in_flight(self) -> None:
        """Forget the plans in flight, but make the block copies of those in the queue, which later plans rely on."""
        self._launched.clear()
        self._has_failed = False
        self._abandon_plans()

    def _abandon_plans(self) -> None:
        for plan in self._plans:
            assert self._runner is not None
            self._runner.abandon(plan)
        self._plans.clear()

    def rank_reports(self) -> tuple[RankReport, ...]:
        """Return a report of the only rank, as it is now."""
        if self._runner is None:
            return ()
        info = RankInfo(process_id=os.getpid(), ip=platform.node(), memory=self._runner.info.memory)
        return (RankReport(info=info, usage=self._runner.usage),)

    def shutdown(self) -> None:
        """Free the model, the slab and the queued plans; idempotent."""
        self._plans.clear()
        self._launched.clear()
        if self._runner is not None:
            self._runner.close()
        self._runner = None
        self._loaded = None


def _reported(plan: StepPlan, error: Exception) -> Exception:
    """Return the error that the engine gets for an error of a plan."""
    if isinstance(error, OutOfMemory):
        return error
    failed = StepFailed(
        f"Step {plan.step_id} failed: {type(error).__name__}: {error}", loss_cause=cause_of_error(error)
    )
    failed.__cause__ = error
    return failed
