"""An executor for tests that interfere with the steps of an engine: they can hold a step, delay it, or let it fail."""

from collections.abc import Callable

from transom_worker.execution.local_executor import LocalExecutor
from transom_worker.scheduling.step import StepResult


class HookedExecutor(LocalExecutor):
    """One rank in this process. It calls `before_step`, which a test sets, before it computes a step."""

    before_step: Callable[[], object] = staticmethod(lambda: None)

    def receive(self) -> StepResult:
        self.before_step()
        return super().receive()
