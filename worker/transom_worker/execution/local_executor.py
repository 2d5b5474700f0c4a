"""Runs the only rank of a worker in the engine's own process."""

from __future__ import annotations

import os
import platform
from collections import deque
from collections.abc import Sequence

from transom_core.config import EngineConfig
from transom_core.errors import OutOfMemory, StepFailed
from transom_worker.execution.executor import Executor, ExecutorInfo, RankInfo, RankReport
from transom_worker.execution.loss_causes import cause_of_error
from transom_worker.execution.runner import ModelRunner
from transom_worker.execution.setup.load_progress import compile_progress
from transom_worker.execution.setup.model_loading import LoadedModel
from transom_worker.execution.setup.model_setup import ModelSetup
from transom_worker.execution.tiers.load_reports import LoadReports
from transom_worker.scheduling.step import StepPlan, StepResult


class LocalExecutor(Executor):
    """Executes the oldest plan, on the calling thread, when its result is received, or earlier if blocks are read or written
    after it."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel | None = None) -> None:
        """Create an executor for the model that the config names, or for `loaded` instead."""
        self._config = config
        self._loaded = loaded
        self._runner: ModelRunner | None = None
        self._plans: deque[StepPlan] = deque()
        self._done: deque[StepResult | Exception] = (
            deque()
        )  # results and failures of plans that were executed before `receive`
        self._load_reports = LoadReports(num_ranks=1)

    def start(self) -> ExecutorInfo:
        """Load the model, size and allocate the arena, and warm up.

        Raises:
            ConfigError: the model or the memory cannot meet the settings.  ModelError: the model cannot be loaded.
        """
        setup = ModelSetup(self._config, loaded=self._loaded)
        with compile_progress():
            self._runner = setup.allocate(setup.pool_bytes())
        return self._runner.info

    def submit(self, plan: StepPlan) -> None:
        """Queue one plan."""
        if self._runner is None:
            raise StepFailed("A plan was submitted to an executor that is not running.")
        self._plans.append(plan)

    def receive(self) -> StepResult:
        """Execute the oldest plan. If it fails, raise StepFailed (OutOfMemory where memory was short) and drop the others."""
        if not self._done:
            self._execute_oldest()
        done = self._done.popleft()
        if isinstance(done, Exception):
            raise done
        return self._load_reports.deliver(done)

    def read_blocks(self, tier: int, group: int, blocks: Sequence[int]) -> list[bytes]:
        """Return the contents of blocks after the queued plans, which are executed first."""
        return [self._runner_after_plans().tiers.read(tier, group, blocks)]

    def write_blocks(self, tier: int, group: int, blocks: Sequence[int], data: Sequence[bytes]) -> None:
        """Write the contents of blocks after the queued plans, which are executed first."""
        (own,) = data
        self._runner_after_plans().tiers.write(tier, group, blocks, own)

    def _runner_after_plans(self) -> ModelRunner:
        if self._runner is None:
            raise StepFailed("Blocks were asked of an executor that is not running.")
        while self._plans:
            self._execute_oldest()
        return self._runner

    def _execute_oldest(self) -> None:
        """Execute the oldest plan; keep its result, or its failure, for `receive`."""
        if self._runner is None or not self._plans:
            raise StepFailed("A result was requested, but no plan was submitted.")
        plan = self._plans.popleft()
        try:
            result = self._runner.execute(plan)
            self._load_reports.add(result.loaded, result.load_s, result.failed)
            self._done.append(result)
        except Exception as error:
            self._runner.abandon(plan)
            self._abandon_plans()
            self._done.append(error if isinstance(error, OutOfMemory) else _step_failed(plan, error))

    def drop_in_flight(self) -> None:
        """Forget the queued plans; their block copies are made."""
        self._done.clear()
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
        self._done.clear()
        if self._runner is not None:
            self._runner.close()
        self._runner = None
        self._loaded = None


def _step_failed(plan: StepPlan, error: Exception) -> StepFailed:
    failed = StepFailed(
        f"Step {plan.step_id} failed: {type(error).__name__}: {error}", loss_cause=cause_of_error(error)
    )
    failed.__cause__ = error
    return failed
