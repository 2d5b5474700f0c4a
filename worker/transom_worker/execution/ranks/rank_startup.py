"""Starts the ranks of an executor: they connect, load at the same time, agree on the size of the KV pool, and allocate it."""

import logging
import time
from collections import Counter
from dataclasses import replace
from typing import TypeVar

from transom_core.errors import ConfigError
from transom_core.model_files.content import join_parts
from transom_worker.execution.executor import ExecutorInfo, MemoryReport, RankInfo
from transom_worker.execution.ranks.group import RankGroup
from transom_worker.execution.ranks.messages import (
    Allocate,
    Hello,
    KvCapacity,
    Load,
    Loaded,
    LoadProgress,
    Measure,
    OpenRendezvous,
    RendezvousOpened,
)

logger = logging.getLogger("transom.worker")

Message = TypeVar("Message")


def start_ranks(group: RankGroup, *, timeout_s: float, pool_bytes: int | None = None) -> tuple[ExecutorInfo, int]:
    """Start newly launched ranks until they are ready for plans; return what the engine must know, and the bytes of the KV pool.

    `timeout_s` limits the time without a message from any rank. `pool_bytes` is the pool's size in an earlier start, which is then
    not measured again.

    Raises:
        RankLost: a rank ended, or no rank sent a message for too long.  ConfigError: two ranks have the same GPU.
        TransomError: a rank's own reason why it cannot start.
    """
    protocol = _StartProtocol(group, timeout_s)
    protocol.load()
    pool_bytes = pool_bytes or protocol.measure()
    return protocol.allocate(pool_bytes), pool_bytes


class _StartProtocol:
    """The messages of one start; see the table in `messages`."""

    def __init__(self, group: RankGroup, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s

    def load(self) -> None:
        self._hellos = self._collect(Hello)
        _check_gpus(self._hellos)
        hosts = tuple(hello.host for hello in self._hellos)
        ranks_by_host = Counter(hosts)
        self._group.send(0, OpenRendezvous(hosts))
        (opened,) = self._collect(RendezvousOpened, num_ranks=1)
        for rank, host in enumerate(hosts):
            index = hosts[:rank].count(host)
            self._group.send(rank, Load(opened.rendezvous, ranks_on_host=ranks_by_host[host], index_on_host=index))
        self._contents = join_parts([part for loaded in self._collect(Loaded) for part in loaded.contents])

    def measure(self) -> int:
        self._group.send_all(Measure())
        return min(capacity.pool_bytes for capacity in self._collect(KvCapacity))

    def allocate(self, pool_bytes: int) -> ExecutorInfo:
        self._group.send_all(Allocate(pool_bytes, self._contents))
        infos = self._collect(ExecutorInfo)
        ranks = tuple(
            RankInfo(process_id=hello.process_id, ip=hello.ip, memory=info.memory, gpu=hello.gpu)
            for hello, info in zip(self._hellos, infos, strict=True)
        )
        # Other workers read the memory of all ranks, or of none.
        memories = tuple(memory for info in infos for memory in info.memories)
        return replace(
            infos[0],
            memory=_total_memory([info.memory for info in infos]),
            ranks=ranks,
            memories=memories if len(memories) == len(infos) else (),
        )

    def _collect(self, kind: type[Message], num_ranks: int | None = None) -> list[Message]:
        """Receive one message of `kind` from each of the first `num_ranks` ranks (None: all), and return them in order of rank."""
        num_ranks = num_ranks or self._group.size
        messages: dict[int, Message] = {}
        while len(messages) < num_ranks:
            rank, message = self._group.receive(time.monotonic() + self._timeout_s)
            if isinstance(message, kind):
                messages[rank] = message
            elif isinstance(message, LoadProgress):
                _log_progress(rank, self._group.size, message)
        return [messages[rank] for rank in range(num_ranks)]


def _check_gpus(hellos: list[Hello]) -> None:
    """Raise ConfigError if two ranks have the same GPU: each would take its whole memory, and nccl refuses them."""
    first: dict[str, int] = {}  # UUID -> rank
    for rank, hello in enumerate(hellos):
        if hello.gpu and (other := first.setdefault(hello.gpu, rank)) != rank:
            raise ConfigError(
                f"Ranks {other} and {rank} of {len(hellos)} both have the GPU {hello.gpu} of {hello.ip}; each needs one of its "
                "own. Ray gives each rank one, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set: unset it on all hosts."
            )


def _log_progress(rank: int, size: int, progress: LoadProgress) -> None:
    logger.info(
        "Rank %d of %d has read %.0f MB, %.0f %% of the tensors.",
        rank,
        size,
        progress.num_bytes / 1e6,
        100 * progress.share,
    )


def _total_memory(reports: list[MemoryReport]) -> MemoryReport:
    """Return the memory that all ranks hold, as one report."""
    return MemoryReport(
        device=f"{len(reports)} x {reports[0].device}",
        weight_bytes=sum(report.weight_bytes for report in reports),
        activation_bytes=sum(report.activation_bytes for report in reports),
        kv_bytes=sum(report.kv_bytes for report in reports),
    )
