"""The interface between the engine and the ranks: an `Executor` takes step plans and returns their results in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from transom_worker.errors import RankLost
from transom_worker.kvcache.layout import ArenaLayout
from transom_worker.planner import CachePlan
from transom_worker.scheduling.step import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Where a worker's memory went, in bytes, for the start-up log."""

    device: str
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """One of several ranks: its process, on which host, and what it holds."""

    process_id: int
    ip: str
    memory: MemoryReport


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUsage:
    """What one rank has used since its process began: seconds in forward passes and in steps altogether, steps whose kernels the
    host launched and steps replayed from a graph, and the memory that it has now beyond weights and KV."""

    forward_s: float = 0.0
    busy_s: float = 0.0
    other_bytes: int = 0
    num_eager_steps: int = 0
    num_graph_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank as its executor last heard of it."""

    info: RankInfo
    usage: RankUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorInfo:
    """What a started executor tells the engine: the cache it owns and the limits of its model."""

    plan: CachePlan
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    memory: MemoryReport
    ranks: tuple[RankInfo, ...] = ()  # where there are several; `memory` is theirs together
    num_graphs: int = 0  # sizes of decode steps that are replayed instead of launched

    @property
    def layout(self) -> ArenaLayout:
        """Where every block lies."""
        return self.plan.layout


class Executor(ABC):
    """Runs plans on every rank of a worker.

    `submit` hands over one plan and returns at once; `receive` waits for the oldest unanswered plan's result. A failing step
    raises StepFailed from `receive`; plans submitted after it are dropped. After RankLost, from `submit` or `receive`, nothing
    works until `restart`. Only the engine's thread calls these, and it calls `shutdown` whatever happened before; `lost` and
    `interrupt` are for any thread.
    """

    @abstractmethod
    def start(self) -> ExecutorInfo:
        """Load the model, size and allocate the arena, warm up."""

    @abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Queue one plan."""

    @abstractmethod
    def receive(self) -> StepResult:
        """Wait for the oldest plan's result. Raises StepFailed."""

    @abstractmethod
    def drop_in_flight(self) -> None:
        """Forget every unanswered plan: its result will not be asked for."""

    @property
    @abstractmethod
    def lost(self) -> bool:
        """Whether a rank has ended by itself, which `check` raises; from any thread."""

    @abstractmethod
    def check(self) -> None:
        """Raises RankLost when a rank has ended by itself."""

    @abstractmethod
    def on_lost(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, on any thread, when `lost` becomes true."""

    def rank_reports(self) -> tuple[RankReport, ...]:
        """What is known of each rank, in order; for whoever looks on."""
        return ()

    def restart(self) -> ExecutorInfo:
        """Start again after RankLost: every rank anew, with an empty arena of the same layout.

        Raises:
            RankLost: it did not come up.
        """
        raise RankLost("This executor has no ranks that could be started again.")

    def interrupt(self) -> None:  # noqa: B027  most executors start nothing that others could wait for
        """Have a start that is under way, and every later one, raise RankLost soon; from any thread. `shutdown` follows."""

    @abstractmethod
    def shutdown(self) -> None:
        """Free everything, end every process; idempotent."""
