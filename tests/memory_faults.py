"""An executor whose steps run out of memory where a test wants it: at any depth of a step, in the words of any allocator."""

from collections.abc import Callable
from typing import Literal, NoReturn

import torch

from tests.hooked_executor import HookedExecutor
from transom_worker.execution.executor import ExecutorInfo
from transom_worker.execution.runner import LaunchedStep
from transom_worker.scheduling.step import StepPlan

Place = Literal["apply", "forward", "sample", "end"]
PLACES: tuple[Place, ...] = ("apply", "forward", "sample", "end")
"""Before the block tables are updated; after the forward pass, which has written its KV; while sampling; after everything."""

ERRORS: dict[Place, Exception] = {
    "apply": MemoryError("Unable to allocate 2.00 GiB for an array"),
    "forward": RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."
    ),
    "sample": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ..."),
    "end": RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
}


class OutOfMemoryExecutor(HookedExecutor):
    """One rank in this process. A step runs out of memory where `fault`, which a test sets, names a place for its plan."""

    fault: Callable[[StepPlan], Place | None] = staticmethod(lambda plan: None)
    num_faults = 0

    def start(self) -> ExecutorInfo:
        info = super().start()
        runner = self._runner
        assert runner is not None
        launch = runner._launch
        self._place: Place | None = None

        def launch_or_fail(plan: StepPlan) -> LaunchedStep:
            self._place = self.fault(plan)
            launched = launch(plan)
            self._fail_at("end")
            return launched

        def failing_at(place: Place, call: Callable[..., object]) -> Callable[..., object]:
            def called(*args: object, **named: object) -> object:
                if place == "apply":
                    self._fail_at(place)
                result = call(*args, **named)
                self._fail_at(place)
                return result

            return called

        prepare = runner._forward.prepare
        runner._launch = launch_or_fail  # type: ignore[method-assign]
        runner._store.update_tables = failing_at("apply", runner._store.update_tables)  # type: ignore[assignment,method-assign]
        runner._forward.prepare = lambda *args: failing_at("forward", prepare(*args))  # type: ignore[assignment,method-assign]
        runner._sampler.sample = failing_at("sample", runner._sampler.sample)  # type: ignore[assignment,method-assign]
        runner._sampler.launch = failing_at("sample", runner._sampler.launch)  # type: ignore[assignment,method-assign]
        return info

    def _fail_at(self, place: Place) -> None:
        if self._place == place:
            self._fail(place)

    def _fail(self, place: Place) -> NoReturn:
        self.num_faults += 1
        raise ERRORS[place]
