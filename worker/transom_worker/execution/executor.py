"""Defines the interface between the engine and the ranks: an `Executor` takes step plans and returns their results in order.

- rank: one of the processes that share a model by tensor parallelism.
- plan (`StepPlan`): what the scheduler wants computed in one step.
- in flight: a plan that was submitted and whose result was not received yet.
- arena: the KV pool of a worker, divided into blocks; `ArenaLayout` says where each block lies.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from transom_core.contract.kv_transfer import RankMemory
from transom_core.errors import RankLost, RequestError, StepFailed
from transom_core.kv_cache.kv_shares import KvShares
from transom_core.kv_cache.layout import ArenaLayout
from transom_worker.planner.plan import CachePlan
from transom_worker.scheduling.step import StepPlan, StepResult


class RemoteBlock(NamedTuple):
    """A block to read: its group, its logical index in the prefix, its tier and id at the source, and those here."""

    group: int
    logical: int
    tier: int
    source: int
    target_tier: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRead:
    """Tells all ranks to read blocks out of the memory of another worker's ranks, each rank its own heads.

    `memories` are those of the source's ranks, and `shares` says what their blocks contain. `digests` are `PrefixOffer.digests`.
    """

    read_id: str
    memories: tuple[RankMemory, ...]
    shares: KvShares
    blocks: tuple[RemoteBlock, ...]
    digests: tuple[dict[int, tuple[bytes, ...]], ...]


class ReadEnd(NamedTuple):
    """A rank's part of a read is over: `error` says why not all was read, and is "" if all was. `seconds` counts from when the rank
    began until no byte could come any more."""

    read_id: str
    error: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What a worker's memory holds, in bytes, for the start-up log."""

    device: str
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """One of several ranks: its process, the address of its host, its memory, and the UUID of its GPU (empty on a CPU)."""

    process_id: int
    ip: str
    memory: MemoryReport
    gpu: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUsage:
    """What happened to the blocks and files of one rank's disk tier since the rank began.

    `num_dropped` blocks were not written because writing did not keep up, and `num_failed` writes ended with an error. Of the files
    that a load asked for, `num_missing` were not there, and `num_broken` were not whole. `num_evicted` files were removed for newer
    ones. While `is_usable` is False, nothing is written.
    """

    is_usable: bool = True
    num_written: int = 0
    num_read: int = 0
    num_missing: int = 0
    num_broken: int = 0
    num_dropped: int = 0
    num_failed: int = 0
    num_evicted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUsage:
    """The time and memory that one rank has used since its process began.

    `num_eager_steps` counts the steps whose kernels the host launched one by one, and `num_eager_decodes` those of them that only
    decode. `num_graph_steps` counts the steps that were replayed from a CUDA graph or a recorded program, and `num_graph_decodes`
    those of them that only decode. `num_wrong_graphs` counts the sizes of steps that run eagerly because their CUDA graph was
    captured twice and both times gave wrong logits. `other_bytes` is the memory that the process holds now beyond weights and KV
    pool.
    """

    forward_s: float = 0.0
    busy_s: float = 0.0
    other_bytes: int = 0
    num_eager_steps: int = 0
    num_eager_decodes: int = 0
    num_graph_steps: int = 0
    num_graph_decodes: int = 0
    num_wrong_graphs: int = 0
    disk: DiskUsage | None = None  # None without a disk tier


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank's process and the usage that it reported last."""

    info: RankInfo
    usage: RankUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorInfo:
    """What a started executor tells the engine: the plan of the cache that it owns, and the limits of its model."""

    plan: CachePlan
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    memory: MemoryReport
    # Empty for a single rank in the engine's process. With several ranks `memory` is the sum over all of them.
    ranks: tuple[RankInfo, ...] = ()
    dtype: str = ""  # the model's number format, torch's name
    kernels: str = "torch"  # what computes the operators: "triton", "cpu" (compiled CPU kernels) or "torch"
    hidden_size: int = 0  # of the model, and so of embeddings
    num_labels: int = 0  # of a classifier; 0: the model writes text
    compile_s: float = 0.0  # seconds for which this start compiled CPU kernels
    kv_policy_obstacle: str = ""  # why the model's layers cannot follow a request's KV policy; empty if they can
    num_graphs: int = 0  # captured CUDA graphs, one for each size of decode steps and mixed steps
    # The model and all else that decides the numbers of these ranks (`setup.cache_setup`); empty for a model without files.
    identity: str = ""
    disk_fingerprint: bytes = b""  # which files of a disk tier the first rank can read
    shares: KvShares | None = None  # what the blocks of every rank contain; None for executors without tensors
    # The memory of every rank, as ranks of other workers read it; empty unless all ranks have a NIXL agent.
    memories: tuple[RankMemory, ...] = ()

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Return the bytes of one block of each group, over all ranks. Ranks with fewer heads count as much as the largest."""
        return tuple(one.block_bytes * self.plan.tensor_parallel_size for one in self.layout.groups)

    @property
    def layout(self) -> ArenaLayout:
        """Return the arena's layout: where every block lies."""
        return self.plan.layout

    @property
    def host_layout(self) -> ArenaLayout | None:
        """Return the layout of the host tier's arena; None if there is no host tier."""
        return self.plan.host_layout


class Executor(ABC):
    """Runs plans on every rank of a worker.

        info = executor.start()
        executor.submit(plan)           up to the scheduler's number of steps in flight
        result = executor.receive()     one for each plan, in order
        executor.restart()              after RankLost
        executor.shutdown()

    `submit` hands over one plan and returns at once; `receive` waits for the result of the oldest plan in flight. If a step fails,
    `receive` raises StepFailed, and the executor drops the plans that were submitted after it. If the step ran out of memory,
    `receive` raises OutOfMemory, and the executor takes further plans; the sequences of the failed plan may be half updated, so
    later plans must not continue them. If a rank is lost, `submit` or `receive` raises RankLost, and nothing works until `restart`;
    its cause is OutOfMemory if the rank ran out of memory in the middle of a step. Only the engine's thread calls the executor,
    except for `lost` and `interrupt`, which any thread may call. The engine calls `shutdown` in every case.
    """

    @abstractmethod
    def start(self) -> ExecutorInfo:
        """Load the model, size and allocate the arena, and warm up."""

    @abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Queue one plan."""

    @abstractmethod
    def receive(self) -> StepResult:
        """Wait for the result of the oldest plan in flight. Raises StepFailed, OutOfMemory, RankLost."""

    @abstractmethod
    def drop_in_flight(self) -> None:
        """Forget every plan in flight: the engine will not receive their results."""

    @property
    def lost(self) -> bool:
        """Return whether a rank's process has ended by itself, which makes `check` raise; always False for a rank in this process.
        Any thread may read it."""
        return False

    def check(self) -> None:  # noqa: B027
        """Raise RankLost when a rank has ended by itself."""

    def on_lost(self, callback: Callable[[], None]) -> None:  # noqa: B027
        """Call `callback`, on any thread, when `lost` becomes true."""

    @abstractmethod
    def read_blocks(self, tier: int, group: int, blocks: Sequence[int]) -> list[bytes]:
        """Return the contents of a group's blocks in a tier, as they are after all plans that were submitted so far.

        The list has the bytes of every rank, in order of rank: one block after the other, `block_bytes` each of that rank's own
        layout. A call reads one block, or at most `PIECE_BYTES` per rank. If a plan fails meanwhile, `receive` reports it.

        Raises:
            ValueError: there is no such tier, group or block, or the piece is too large.  StepFailed: the executor does not run.
            RankLost: a rank was lost.
        """

    @abstractmethod
    def write_blocks(self, tier: int, group: int, blocks: Sequence[int], data: Sequence[bytes]) -> None:
        """Write contents into blocks after all plans that were submitted so far. `data` and errors are as of `read_blocks`."""

    def load_adapter(self, slot: int, path: str) -> None:
        """Copy a LoRA adapter, a PEFT folder, into a slot of every rank after all plans that were submitted so far. After a start
        all slots are empty. Raises RequestError: it cannot be loaded, and the slot holds nothing.  StepFailed, RankLost."""
        raise RequestError("This worker takes no LoRA adapters; serve with --enable-lora.", param="lora_path")

    def begin_read(self, read: RemoteRead) -> None:
        """Let all ranks read another worker's memory after the plans that were submitted so far; does not wait for these. Only
        executors whose `ExecutorInfo` has `memories` can. Raises StepFailed: the executor does not run.  RankLost."""
        raise StepFailed("These ranks cannot read the memory of other workers.")

    def on_read_end(self, callback: Callable[[int, ReadEnd], None]) -> None:  # noqa: B027
        """Call `callback` on any thread, with the rank, when its part of a read is over."""

    def take_read_ends(self) -> None:  # noqa: B027
        """Take the reports of ended reads that have come. `receive` does this too, but an idle engine does not call it. Raises
        RankLost."""

    def rank_reports(self) -> tuple[RankReport, ...]:
        """Return the last report of each rank, in order of rank, for metrics."""
        return ()

    def restart(self) -> ExecutorInfo:
        """Start every rank again after RankLost, with an empty arena of the same layout.

        Raises:
            RankLost: the ranks did not start.
        """
        raise RankLost("This executor has no ranks that could be started again.")

    def reload(self, model: str) -> ExecutorInfo:
        """Load the weights of another checkpoint of the same architecture, with an empty arena of the same layout. No plan may be
        in flight, and an error leaves an executor that does not run.

        Raises:
            ModelError: the checkpoint cannot be loaded.  RankLost: the ranks did not start.
        """
        raise RankLost("This executor cannot load other weights.")

    def interrupt(self) -> None:  # noqa: B027  an executor whose start never waits for a process has nothing to interrupt
        """Make a running step or start, and every later one, raise RankLost soon. Any thread may call this; it cannot be undone."""

    @abstractmethod
    def shutdown(self) -> None:
        """Free all memory and end every process; idempotent."""
