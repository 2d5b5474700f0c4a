"""Several ranks of one worker in one process, a thread each: the same code as in processes of their own, without their start."""

import os
import platform
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tests.engine_driver import make_engine
from transom_core.config import EngineConfig
from transom_core.errors import RankLost, StepFailed
from transom_core.model_files.content import join_parts
from transom_worker.engine.engine import Engine
from transom_worker.execution.batch.sequences import SequenceStore
from transom_worker.execution.executor import Executor, ExecutorInfo, RankInfo, RankReport, ReadEnd, RemoteRead
from transom_worker.execution.forward_pass import ForwardPass
from transom_worker.execution.runner import ModelRunner
from transom_worker.execution.setup.model_setup import ModelSetup
from transom_worker.execution.step_sampling import StepLogits
from transom_worker.execution.tiers.load_reports import LoadReports
from transom_worker.models.parallel.communicator import SINGLE_RANK, Communicator, Parallel
from transom_worker.scheduling.step import StepPlan, StepResult

TIMEOUT_S = 60.0


class Rendezvous:
    """Collects the tensors of all threads; the last thread to arrive computes the result for all of them."""

    def __init__(self, size: int) -> None:
        self.sum_widths: list[int] = []
        self._brought: list[tuple[str, torch.Tensor] | None] = [None] * size
        self._made: Any = None
        self._barrier = threading.Barrier(size, self._make, timeout=TIMEOUT_S)

    def come(self, rank: int, what: str, x: torch.Tensor) -> Any:
        """Return the result that was computed of all ranks' tensors."""
        self._brought[rank] = (what, x)
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise RankLost("Another rank has failed.") from None
        return self._made

    def leave(self) -> None:
        """Release the waiting threads, because a rank has failed."""
        self._barrier.abort()

    def reset(self) -> None:
        """Let all ranks take part again."""
        self._barrier.reset()

    def _make(self) -> None:
        assert len({brought[0] for brought in self._brought if brought}) == 1, "ranks ask for different things"
        what, tensors = self._brought[0][0], [x for _, x in filter(None, self._brought)]  # type: ignore[index]
        match what:
            case "sum":
                assert len({x.shape for x in tensors}) == 1, [x.shape for x in tensors]
                self.sum_widths.append(tensors[0].shape[-1])
                self._made = sum(tensors[1:], tensors[0].clone())
            case "gather":
                self._made = [x.clone() for x in tensors]
            case "broadcast":
                self._made = tensors[0].clone()


class ThreadComm(Communicator):
    """One thread's communicator; sums are in order of rank. Counts the tensors that it exchanges."""

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self._rendezvous, self._rank = rendezvous, rank
        self.num_operations = 0
        self.gathered_elements = 0

    def _all_reduce(self, x: torch.Tensor) -> None:
        x.copy_(self._come("sum", x))

    def gather(self, x: torch.Tensor, *, fixed_widths: bool = False) -> list[torch.Tensor] | None:
        self.gathered_elements += x.numel()
        gathered: list[torch.Tensor] = self._come("gather", x)
        return gathered if self._rank == 0 else None

    def _broadcast(self, x: torch.Tensor) -> None:
        x.copy_(self._come("broadcast", x))

    def _come(self, what: str, x: torch.Tensor) -> Any:
        self.num_operations += 1
        return self._rendezvous.come(self._rank, what, x)

    can_capture = False

    def end_step(self) -> None:
        """The threads wait in every collective."""

    def check(self) -> None:
        pass

    def close(self) -> None:
        self._rendezvous.leave()


class RankThreads:
    """Runs something on every rank at once."""

    def __init__(self, size: int) -> None:
        self.rendezvous = Rendezvous(size)
        self.ranks = [
            Parallel(rank=rank, size=size, comm=SINGLE_RANK if size == 1 else ThreadComm(self.rendezvous, rank))
            for rank in range(size)
        ]
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"rank {rank}") for rank in range(size)]

    def on_each(self, call: Callable[[Parallel], Any]) -> list[Any]:
        """Return what `call` returns on each rank; raise the first error that another rank's error did not cause."""

        def guarded(parallel: Parallel) -> Any:
            try:
                return call(parallel)
            except BaseException:
                self.rendezvous.leave()
                raise

        futures = [thread.submit(guarded, rank) for thread, rank in zip(self._threads, self.ranks, strict=True)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            self.rendezvous.reset()
            raise next((error for error in errors if not isinstance(error, RankLost)), errors[0])
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.shutdown()


def on_ranks(size: int, call: Callable[[Parallel], Any]) -> list[Any]:
    """What `call` returns on each of `size` ranks that run at once."""
    threads = RankThreads(size)
    try:
        return threads.on_each(call)
    finally:
        threads.close()


class KeptLogits:
    """A forward pass that remembers its logits."""

    def __init__(self, forward: ForwardPass) -> None:
        self._forward = forward
        self.logits: list[torch.Tensor] = []

    def prepare(
        self, plan: StepPlan, store: SequenceStore, sampled_S: torch.Tensor | None = None
    ) -> Callable[[], StepLogits]:
        run = self._forward.prepare(plan, store, sampled_S)

        def kept() -> StepLogits:
            logits = run()
            self.logits.append(logits.sampled_SV.clone())  # sampling may write into it
            return logits

        return kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)


class ThreadRanks(Executor):
    """As `LocalExecutor`, on several ranks; a step's ranks must sample the same tokens."""

    def __init__(self, config: EngineConfig, size: int) -> None:
        self._config, self._plans = config, deque[StepPlan]()
        self._done = deque[StepResult | StepFailed]()  # of plans that were executed before their results were asked for
        self.threads = RankThreads(size)
        self.runners: list[ModelRunner] = []
        self._kept: list[KeptLogits] = []
        self._loads = LoadReports(size)

    def start(self) -> ExecutorInfo:
        setups = self.threads.on_each(lambda parallel: ModelSetup(self._config, parallel))
        pool_bytes = min(self.threads.on_each(lambda parallel: setups[parallel.rank].pool_bytes()))
        contents = join_parts([part for setup in setups for part in setup.contents])
        self.runners = self.threads.on_each(lambda parallel: setups[parallel.rank].allocate(pool_bytes, contents))
        for runner in self.runners:
            kept = KeptLogits(runner._forward)
            runner._forward = kept  # type: ignore[assignment]
            self._kept.append(kept)
        memories = tuple(memory for runner in self.runners for memory in runner.info.memories)
        return replace(self.runners[0].info, memories=memories)

    def logits(self) -> list[torch.Tensor]:
        """Logits of all steps so far, over the whole vocabulary; then they are forgotten."""
        steps = [torch.cat(parts, dim=1) for parts in zip(*(kept.logits for kept in self._kept), strict=True)]
        for kept in self._kept:
            kept.logits = []
        return steps

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def receive(self) -> StepResult:
        if not self._done:
            self._execute_oldest()
        done = self._done.popleft()
        if isinstance(done, StepFailed):
            raise done
        return self._loads.deliver(done)

    def _execute_oldest(self) -> None:
        plan = self._plans.popleft()
        try:
            results = self.threads.on_each(lambda parallel: self.runners[parallel.rank].execute(plan))
        except Exception as error:
            self._abandon_plans()
            failed = StepFailed(f"Step {plan.step_id} failed: {error}")
            failed.__cause__ = error
            self._done.append(failed)
            return
        assert all(result.sampled_ids == results[0].sampled_ids for result in results)
        for result in results:
            self._loads.add(result.loaded, result.load_s, result.failed)
        self._done.append(results[0])

    def drop_in_flight(self) -> None:
        self._done.clear()
        self._abandon_plans()

    def _abandon_plans(self) -> None:
        for plan in self._plans:
            for runner in self.runners:
                runner.abandon(plan)
        self._plans.clear()

    def _execute_all(self) -> None:
        """Blocks are read and written after the plans that were submitted before."""
        while self._plans:
            self._execute_oldest()

    def read_blocks(self, tier: int, group: int, blocks: Sequence[int]) -> list[bytes]:
        self._execute_all()
        return [runner.tiers.read(tier, group, blocks) for runner in self.runners]

    def write_blocks(self, tier: int, group: int, blocks: Sequence[int], data: Sequence[bytes]) -> None:
        self._execute_all()
        for runner, part in zip(self.runners, data, strict=True):
            runner.tiers.write(tier, group, blocks, part)

    def load_adapter(self, slot: int, path: str) -> None:
        self._execute_all()
        for runner in self.runners:
            runner.load_adapter(slot, path)

    def begin_read(self, read: RemoteRead) -> None:
        self._execute_all()
        for runner in self.runners:
            runner.tiers.begin_read(read)

    def on_read_end(self, callback: Callable[[int, ReadEnd], None]) -> None:
        for rank, runner in enumerate(self.runners):
            runner.tiers.on_read_end(partial(callback, rank))

    def rank_reports(self) -> tuple[RankReport, ...]:
        return tuple(
            RankReport(
                info=RankInfo(process_id=os.getpid(), ip=platform.node(), memory=runner.info.memory), usage=runner.usage
            )
            for runner in self.runners
        )

    def shutdown(self) -> None:
        self._plans.clear()
        self._done.clear()
        for runner in self.runners:
            runner.close()
        self.runners, self._kept = [], []
        self.threads.close()


def make_sharded_engine(model: str, size: int, **settings: Any) -> tuple[Engine, ThreadRanks]:
    """An engine over a small pool, on `size` ranks."""
    engine = make_engine(model, executor=partial(ThreadRanks, size=size), **settings)
    assert isinstance(engine.executor, ThreadRanks)
    return engine, engine.executor
