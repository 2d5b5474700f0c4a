"""`RemoteReads`: reads blocks out of the memory of another worker's ranks into this rank's host tier, beside the steps.

    begin    the rank's thread works out what to read from which rank, and queues the read
    ...      a thread of its own starts the reads by the rank's agent, and looks after them
    poll     returns RUNNING while bytes may still arrive, then DONE or the reason of a failure, once; after that GONE

A read that fails, or that its request gives up, is over only when no byte can arrive: until then its state is RUNNING, and its
host blocks must not be used for anything else. `nixl_agent` says when that is.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from transom_core.contract.kv_transfer import RankMemory
from transom_core.kv_cache.kv_shares import KvShares
from transom_worker.execution.executor import DONE, GONE, RUNNING, RemoteRead
from transom_worker.execution.tiers.nixl_agent import NixlAgent, Spans
from transom_worker.kvcache.tiers.block_format.segments import Segment, block_segments

logger = logging.getLogger("transom.worker")

# The bytes of one handle. Python's global lock is held while a transport copies them at once, about 1 ms.
HANDLE_BYTES = 4 << 20
POLL_S = 2e-4  # between two looks at the reads in flight; 4 MiB take 1 ms on one host
CLOSE_S = 2.0  # how long the last reads may take when the rank ends


@dataclass(slots=True, eq=False)
class _Read:
    """A read in flight. `spans` has, by the source's rank and by the kind and device of its memory, what to read there."""

    memories: tuple[RankMemory, ...]
    spans: dict[tuple[int, str, int], Spans]
    handles: list[tuple[int, Any]] = field(default_factory=list)  # with the source's rank
    error: str = ""


class RemoteReads:
    """The reads of one rank into its `target_tier`. `shares` says what the blocks of this worker's ranks contain."""

    def __init__(self, agent: NixlAgent, shares: KvShares, rank: int, target_tier: int) -> None:
        self._agent, self._shares, self._rank = agent, shares, rank
        self.memory = agent.memory  # what other ranks need to read this rank's memory
        self._target = agent.memory.regions.get(target_tier)
        self._states: dict[str, str] = {}  # by read; the thread writes the last state
        self._new: SimpleQueue[tuple[str, _Read] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # By agent: sources of failed reads, until their connections are closed.
        self._broken: dict[bytes, RankMemory] = {}

    def begin(self, read: RemoteRead) -> str:
        """Queue a read, and return RUNNING.

        Raises:
            ValueError: the source keeps its blocks in a format from which this rank cannot read.
        """
        spans = self._spans(read)
        self._states[read.read_id] = RUNNING
        self._new.put((read.read_id, _Read(read.memories, spans)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="transom-remote-reads", daemon=True)
            self._thread.start()
        return RUNNING

    def poll(self, read_id: str) -> str:
        """Return a read's state."""
        if self._states.get(read_id) == RUNNING:
            return RUNNING
        return self._states.pop(read_id, GONE)

    def close(self) -> None:
        """Wait a moment for reads in flight, and take the memory back; idempotent."""
        if self._thread is not None:
            self._new.put(None)
            self._thread.join(2 * CLOSE_S)
            if self._thread.is_alive():
                logger.warning("NIXL hangs in a call; the memory stays registered until it returns.")
                return
        self._agent.close()

    def _spans(self, read: RemoteRead) -> dict[tuple[int, str, int], Spans]:
        if self._target is None:
            raise ValueError("this rank has no host tier.")
        found: dict[tuple[int, str, int], list[Spans]] = {}
        for group in sorted({block.group for block in read.blocks}):
            segments = block_segments(read.shares, self._shares, group, self._rank)
            for tier in sorted({block.tier for block in read.blocks if block.group == group}):
                pairs = [(one.source, one.target) for one in read.blocks if (one.group, one.tier) == (group, tier)]
                for rank in sorted({segment.rank for segment in segments}):
                    region = read.memories[rank].regions[tier]
                    starts = np.array(pairs, np.uint64) * np.array(
                        [region.strides[group], self._target.strides[group]], np.uint64
                    )
                    starts += np.array([region.address, self._target.address], np.uint64)
                    spans = _spans_of(starts, [one for one in segments if one.rank == rank])
                    found.setdefault((rank, region.kind, region.device), []).append(spans)
        return {key: np.concatenate(parts) for key, parts in found.items()}

    def _run(self) -> None:
        reads: dict[str, _Read] = {}
        until_s: float | None = None  # None: the rank is not ending
        while until_s is None or (reads and time.monotonic() < until_s):
            try:
                new = self._new.get(timeout=POLL_S) if reads else self._new.get()
            except Empty:
                pass
            else:
                if new is None:
                    until_s = time.monotonic() + CLOSE_S
                else:
                    read_id, reads[new[0]] = new
                    self._start(reads[read_id])
            self._look_after(reads)

    def _start(self, read: _Read) -> None:
        try:
            for (rank, kind, device), spans in read.spans.items():
                source = read.memories[rank]
                if source.agent in self._broken:
                    raise ConnectionError("the connection is broken")
                for part in np.split(spans, _cuts(spans)):
                    read.handles.append((rank, self._agent.start(source, (kind, device), part)))
        except Exception as error:  # of the library, for a source that is gone, among others
            read.error = f"{type(error).__name__}: {error}"
            self._broken[source.agent] = source

    def _look_after(self, reads: dict[str, _Read]) -> None:
        """Forget ended handles, note the last state of reads that are over, and close broken connections without reads."""
        for read_id, read in list(reads.items()):
            read.handles = [one for one in read.handles if not self._is_over(read, *one)]
            if not read.handles:
                self._states[read_id] = read.error or DONE
                del reads[read_id]
        in_use = {read.memories[rank].agent for read in reads.values() for rank, _ in read.handles}
        for agent in [agent for agent in self._broken if agent not in in_use]:
            with contextlib.suppress(Exception):  # the source is gone
                self._agent.disconnect(self._broken.pop(agent))

    def _is_over(self, read: _Read, rank: int, handle: Any) -> bool:
        """Return whether no bytes of a handle can arrive any more."""
        state = self._agent.state(handle)
        if state not in ("PROC", "DONE"):
            read.error = read.error or f"the read ended as {state}"
            self._broken[read.memories[rank].agent] = read.memories[rank]  # so that a later read connects again
        return state != "PROC"


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
