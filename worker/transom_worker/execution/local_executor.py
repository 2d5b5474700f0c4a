"""Runs the only rank of a worker in the engine's own process."""

from __future__ import annotations

import os
import platform
from collections import deque
from collections.abc import Callable

from transom_worker.config import EngineConfig
from transom_worker.errors import OutOfMemory, StepFailed
from transom_worker.execution.executor import Executor, ExecutorInfo, RankInfo, RankReport
from transom_worker.execution.loss_causes import cause_of_error
from transom_worker.execution.model_loading import LoadedModel
from transom_worker.execution.runner import ModelRunner
from transom_worker.scheduling.step import StepPlan, StepResult


class LocalExecutor(Executor):
    """Executes the oldest plan, on the calling thread, when its result is received."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel | None = None) -> None:
        """Create an executor for the model that the config names, or for `loaded` in its place."""
        self._config = config
        self._loaded = loaded
        self._runner: ModelRunner | None = None
        self._plans: deque[StepPlan] = deque()

    def start(self) -> ExecutorInfo:
        """Load the model, size and allocate the arena, and warm up.

        Raises:
            ConfigError: the model or the memory cannot meet the settings.  ModelError: the model cannot be loaded.
        """
        self._runner = ModelRunner(self._config, loaded=self._loaded)
        return self._runner.allocate(self._runner.pool_bytes())

    def submit(self, plan: StepPlan) -> None:
        """Queue one plan."""
        if self._runner is None:
            raise StepFailed("A plan was submitted to an executor that is not running.")
        self._plans.append(plan)

    def receive(self) -> StepResult:
        """Execute the oldest plan. If it fails, raise StepFailed (OutOfMemory where memory was short) and drop the others."""
        if self._runner is None or not self._plans:
            raise StepFailed("A result was requested, but no plan was submitted.")
        plan = self._plans.popleft()
        try:
            return self._runner.execute(plan)
        except BaseException as error:
            self._runner.abandon(plan)
            self.drop_in_flight()
            if not isinstance(error, Exception) or isinstance(error, OutOfMemory):
                raise  # a KeyboardInterrupt must reach the program that runs the engine
            message = f"Step {plan.step_id} failed: {type(error).__name__}: {error}"
            raise StepFailed(message, loss_cause=cause_of_error(error)) from error

    def drop_in_flight(self) -> None:
        """Forget the queued plans."""
        for plan in self._plans:
            assert self._runner is not None
            self._runner.abandon(plan)
        self._plans.clear()

    def rank_reports(self) -> tuple[RankReport, ...]:
        """Return a report of the only rank, as it is now."""
        if self._runner is None:
            return ()
        info = RankInfo(process_id=os.getpid(), ip=platform.node(), memory=self._runner.memory_report)
        return (RankReport(info=info, usage=self._runner.usage),)

    @property
    def lost(self) -> bool:
        """Always false: the only rank ends with this process."""
        return False

    def check(self) -> None:
        """Do nothing: the only rank cannot be lost."""

    def on_lost(self, callback: Callable[[], None]) -> None:
        """Do nothing: the only rank cannot be lost, so `callback` is never called."""

    def shutdown(self) -> None:
        """Free the model, the slab and the queued plans; idempotent."""
        self._plans.clear()
        self._runner = None
        self._loaded = None
