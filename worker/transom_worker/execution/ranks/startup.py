"""The executor's side of how ranks start: they meet, load at the same time, agree on a pool, and allocate it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import replace
from typing import TypeVar

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
    Ready,
    RendezvousOpened,
)

logger = logging.getLogger("transom.worker")

Message = TypeVar("Message")


def start_ranks(group: RankGroup, *, timeout_s: float, pool_bytes: int | None = None) -> tuple[ExecutorInfo, int]:
    """Brings processes that were just started to where they take plans; returns what the engine must know, and the pool's bytes.

    `timeout_s` bounds any silence. `pool_bytes` is the pool of an earlier start, which is not measured again.

    Raises:
        RankLost: a rank ended or was silent for too long.  TransomError: a rank's own reason why it cannot start.
    """
    dialogue = _StartProtocol(group, timeout_s)
    dialogue.load()
    pool_bytes = pool_bytes or dialogue.measure()
    return dialogue.allocate(pool_bytes), pool_bytes


class _StartProtocol:
    """One start."""

    def __init__(self, group: RankGroup, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s

    def load(self) -> None:
        self._hellos = self._collect(Hello)
        hosts = tuple(hello.host for hello in self._hellos)
        beside = Counter(hosts)
        self._group.send(0, OpenRendezvous(hosts))
        (opened,) = self._collect(RendezvousOpened, ranks=1)
        for rank, host in enumerate(hosts):
            self._group.send(rank, Load(opened.rendezvous, ranks_on_host=beside[host]))
        self._collect(Loaded)

    def measure(self) -> int:
        self._group.send_all(Measure())
        return min(room.pool_bytes for room in self._collect(KvCapacity))

    def allocate(self, pool_bytes: int) -> ExecutorInfo:
        self._group.send_all(Allocate(pool_bytes))
        infos = [ready.info for ready in self._collect(Ready)]
        ranks = tuple(
            RankInfo(process_id=hello.process_id, ip=hello.ip, memory=info.memory)
            for hello, info in zip(self._hellos, infos, strict=True)
        )
        return replace(infos[0], memory=_together([info.memory for info in infos]), ranks=ranks)

    def _collect(self, kind: type[Message], ranks: int | None = None) -> list[Message]:
        """One message of `kind` from each of the first `ranks` ranks, in order of rank."""
        wanted = self._group.size if ranks is None else ranks
        found: dict[int, Message] = {}
        while len(found) < wanted:
            rank, message = self._group.receive(time.monotonic() + self._timeout_s)
            if isinstance(message, kind):
                found[rank] = message
            elif isinstance(message, LoadProgress):
                _show(rank, self._group.size, message)
        return [found[rank] for rank in range(wanted)]


def _show(rank: int, size: int, progress: LoadProgress) -> None:
    logger.info(
        "Rank %d of %d has read %.0f MB, %.0f %% of the tensors.",
        rank,
        size,
        progress.num_bytes / 1e6,
        100 * progress.share,
    )


def _together(reports: list[MemoryReport]) -> MemoryReport:
    """What all ranks hold."""
    return MemoryReport(
        device=f"{len(reports)} x {reports[0].device}",
        weight_bytes=sum(report.weight_bytes for report in reports),
        activation_bytes=sum(report.activation_bytes for report in reports),
        kv_bytes=sum(report.kv_bytes for report in reports),
    )
