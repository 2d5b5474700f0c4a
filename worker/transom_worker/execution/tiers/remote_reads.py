"""`RemoteReads`: reads blocks out of the memory of another worker's ranks into this rank's tiers, beside the steps.

    begin     queues a read; from here on a thread of this class works out what to read from which rank, starts the reads by the
              rank's agent, and looks after them
    on_end    is called once, on that thread

A read that fails, or that its request gives up, is over only when no byte can arrive: until then `on_end` is not called, and its
blocks must not be used for anything else. `nixl_agent` says when that is.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from transom_core.kv_cache.kv_shares import KvShares
from transom_worker.execution.executor import ReadEnd, RemoteRead
from transom_worker.execution.tiers.nixl_agent import NixlAgent, Spans
from transom_worker.execution.tiers.slabs import TierMemory
from transom_worker.kvcache.tiers.block_format import Segment, block_digest, block_segments

logger = logging.getLogger("transom.worker")

# The bytes of one handle. Python's global lock is held while a transport copies them at once, about 1 ms.
HANDLE_BYTES = 4 << 20
POLL_S = 2e-4  # between two looks at the reads in flight; 4 MiB take 1 ms on one host
IDLE_S = 3600.0  # after which a connection is closed that was not used: its source may be gone
CLOSE_S = 2.0  # how long the last reads may take when the rank ends
OTHER_BYTES = "blocks came with other bytes than the source has"


@dataclass(slots=True, eq=False)
class _Read:
    """A read in flight: `order` is what to read. Each handle stands with the source's rank."""

    order: RemoteRead
    handles: list[tuple[int, Any]] = field(default_factory=list)
    error: str = ""
    begin_s: float = field(default_factory=time.monotonic)


class RemoteReads:
    """The reads of one rank into `memories`, by tier. `shares` says what the blocks of this worker's ranks contain."""

    def __init__(self, agent: NixlAgent, shares: KvShares, rank: int, memories: Mapping[int, TierMemory]) -> None:
        self._agent, self._shares, self._rank, self._memories = agent, shares, rank, memories
        self.memory = agent.memory  # what other ranks need to read this rank's memory
        self.on_end: Callable[[ReadEnd], None] = lambda end: None
        self._new: SimpleQueue[RemoteRead | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # By agents' metadata: when a read from each one last began, and those whose connections are to be closed, since a read
        # failed or none came for long.
        self._used_s: dict[bytes, float] = {}
        self._to_close: set[bytes] = set()

    def begin(self, order: RemoteRead) -> None:
        """Queue a read."""
        self._new.put(order)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="transom-remote-reads", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Wait a moment for reads in flight, and take the memory back; idempotent."""
        if self._thread is not None:
            self._new.put(None)
            self._thread.join(2 * CLOSE_S)
            if self._thread.is_alive():
                logger.warning("NIXL hangs in a call; the memory stays registered until it returns.")
                return
        self._agent.close()

    def _spans(self, order: RemoteRead) -> dict[tuple[int, str, int, int], Spans]:
        """Return what to read, by the source's rank, the kind and device of its memory, and the tier here."""
        found: dict[tuple[int, str, int, int], list[Spans]] = {}
        for group in sorted({block.group for block in order.blocks}):
            segments = block_segments(order.shares, self._shares, group, self._rank)
            of_group = [block for block in order.blocks if block.group == group]
            for tiers in sorted({(block.tier, block.target_tier) for block in of_group}):
                pairs = [(one.source, one.target) for one in of_group if (one.tier, one.target_tier) == tiers]
                own = self._agent.memory.regions[tiers[1]]
                for rank in sorted({segment.rank for segment in segments}):
                    region = order.memories[rank].regions[tiers[0]]
                    starts = np.array(pairs, np.uint64) * np.array(
                        [region.strides[group], own.strides[group]], np.uint64
                    )
                    starts += np.array([region.address, own.address], np.uint64)
                    spans = _spans_of(starts, [one for one in segments if one.rank == rank])
                    found.setdefault((rank, region.kind, region.device, tiers[1]), []).append(spans)
        return {key: np.concatenate(parts) for key, parts in found.items()}

    def _run(self) -> None:
        reads: list[_Read] = []
        until_s: float | None = None  # None: the rank is not ending
        while until_s is None or (reads and time.monotonic() < until_s):
            try:
                order = self._new.get(timeout=POLL_S) if reads else self._new.get()
            except Empty:
                pass
            else:
                if order is None:
                    until_s = time.monotonic() + CLOSE_S
                else:
                    reads.append(self._start(order))
            reads = self._look_after(reads)

    def _start(self, order: RemoteRead) -> _Read:
        read, source = _Read(order), None
        try:
            for (rank, kind, device, tier), spans in self._spans(order).items():
                source = order.memories[rank]
                if source.agent in self._to_close:
                    raise ConnectionError("the connection is broken")
                self._used_s[source.agent] = read.begin_s
                for part in np.split(spans, _cuts(spans)):
                    read.handles.append((rank, self._agent.start(source, (kind, device), part, tier)))
        except Exception as error:  # of the library, say for a source that is gone, or of formats that differ
            read.error = f"{type(error).__name__}: {error}"
            if source is not None:
                self._to_close.add(source.agent)
        self._to_close |= {agent for agent, used_s in self._used_s.items() if read.begin_s - used_s > IDLE_S}
        return read

    def _look_after(self, reads: list[_Read]) -> list[_Read]:
        """Report reads that are over, close connections without reads that are to be closed, and return the reads that are left."""
        for read in reads:
            read.handles = [one for one in read.handles if not self._is_over(read, *one)]
        left = [read for read in reads if read.handles]
        in_use = {read.order.memories[rank].agent for read in left for rank, _ in read.handles}
        for agent in self._to_close - in_use:
            self._to_close.remove(agent)
            self._used_s.pop(agent, None)
            with contextlib.suppress(Exception):  # the source is gone
                self._agent.disconnect(agent)
        for read in reads:
            if not read.handles:
                seconds = time.monotonic() - read.begin_s
                self.on_end(ReadEnd(read.order.read_id, read.error or self._compared(read.order), seconds))
        return left

    def _is_over(self, read: _Read, rank: int, handle: Any) -> bool:
        """Return whether no bytes of a handle can arrive any more."""
        state, source = self._agent.state(handle), read.order.memories[rank]
        if state not in ("PROC", "DONE"):
            read.error = read.error or f"the read ended as {state}"
            self._to_close.add(source.agent)  # so that a later read connects again
        return state != "PROC"

    @torch.inference_mode()
    def _compared(self, order: RemoteRead) -> str:
        """Return "" if the blocks of which the source has sent digests have the same contents here, else OTHER_BYTES, or why they
        cannot be compared: the thread must go on."""
        try:
            for block in order.blocks:
                digests = order.digests[block.group].get(block.logical)
                if digests is not None:
                    row = self._memories[block.target_tier].rows(block.group)[block.target].cpu().numpy()
                    own = block_digest(order.shares, self._shares, block.group, self._rank, row)
                    if own != digests[self._rank]:
                        return OTHER_BYTES
        except Exception as error:  # of an offer that does not fit, or of the device
            return f"{type(error).__name__}: {error}"
        return ""


def _cuts(spans: Spans) -> list[int]:
    """Return where to divide spans, so that each part has about `HANDLE_BYTES`."""
    numbers = np.cumsum(spans[:, 2]) // HANDLE_BYTES
    return [int(at) + 1 for at in np.flatnonzero(np.diff(numbers))]


def _spans_of(starts: Spans, segments: list[Segment]) -> Spans:
    """Return the spans of blocks that begin at `starts`, [blocks, 2], there and here."""
    offsets = np.array([(one.source, one.target) for one in segments], np.uint64)
    ends = (starts[:, None] + offsets[None]).reshape(-1, 2)
    sizes = np.tile(np.array([one.size for one in segments], np.uint64), len(starts))
    return np.concatenate([ends, sizes[:, None]], axis=1)
