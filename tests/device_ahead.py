"""An executor on the CPU whose device seems to lag the host, as a GPU does: the host learns a step's tokens only when it waits."""

import torch

from tests.hooked_executor import HookedExecutor
from transom_worker.execution.device_queue import Fetch
from transom_worker.execution.executor import ExecutorInfo


class LaggingQueue:
    """Keeps what happened, in order: "launched", and "waited" where the host has waited for a step's tokens."""

    runs_ahead = True

    def __init__(self) -> None:
        self.log: list[str] = []
        self.num_open = 0

    def fetch(self, ids_S: torch.Tensor) -> Fetch:
        self.log.append("launched")
        self.num_open += 1
        assert self.num_open <= 2, "a place of the pinned memory would be used twice"
        return LaggingFetch(self, ids_S.clone())

    @property
    def num_ahead(self) -> int:
        """How many steps were launched before the tokens of the last one had been waited for."""
        return sum(pair == ("launched", "launched") for pair in zip(self.log, self.log[1:], strict=False))


class LaggingFetch:
    """Ids of one step on their way."""

    def __init__(self, queue: LaggingQueue, ids_S: torch.Tensor) -> None:
        self._queue, self._ids_S = queue, ids_S

    def __call__(self) -> list[int]:
        self._queue.log.append("waited")
        self._queue.num_open -= 1
        ids: list[int] = self._ids_S.tolist()
        return ids

    def is_ready(self) -> bool:
        return False


class AheadExecutor(HookedExecutor):
    """One rank in this process, whose steps are launched when they are submitted."""

    def start(self) -> ExecutorInfo:
        info = super().start()
        assert self._runner is not None
        self.queue = self._runner._queue = LaggingQueue()
        return info
