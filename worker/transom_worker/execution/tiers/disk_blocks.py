"""Keeps a rank's KV blocks in files (`DiskTier`). One thread writes the blocks that leave the memory, and another one reads the
blocks of loads; both run beside the steps.

    store     copy a block's bytes now; a thread writes the file later. If the thread does not keep up, blocks are dropped, because
              the disk must not slow steps down
    fetch     let a thread read the blocks of one load, under a *ticket*, into the host's arena; the load fails if a block is
              missing or its file is broken

If a write fails, for example because the disk is full, writing pauses for `PAUSE_S`, and new blocks are dropped meanwhile. Blocks
that were written before can still be read, since each file is checked.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

import torch

from transom_worker.execution.executor import DiskUsage
from transom_worker.execution.tiers.load_copies import LoadBoard
from transom_worker.kvcache.tiers.disk.folder import BlockFolder

logger = logging.getLogger("transom.worker")

QUEUED_BYTES = 64 << 20  # the most that may wait to be written
PAUSE_S = 60.0
CLOSE_S = 5.0


class StoredBlock(NamedTuple):
    """A block on its way to the disk."""

    group: int
    digest: bytes
    contents: bytes


class FetchedBlock(NamedTuple):
    """A block that a load reads from the disk into `target`, a row of the host's arena as long as the block."""

    group: int
    digest: bytes
    target: torch.Tensor


class DiskTier:
    """The files of one rank, and the threads that write and read them; these begin with their first work."""

    def __init__(self, folder: BlockFolder, board: LoadBoard, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._board, self._now_s = folder, board, now_s
        self._writes: SimpleQueue[StoredBlock | None] = SimpleQueue()
        self._fetches: SimpleQueue[tuple[int, list[FetchedBlock]] | None] = SimpleQueue()
        self._has_written = threading.Condition()  # guards the two numbers below; notified when the first falls
        self._queued_bytes = 0
        self._num_dropped = 0
        self._num_failed = 0
        self._paused_until_s: float | None = None
        self._threads: dict[str, threading.Thread] = {}
        self._is_closed = False

    @property
    def usage(self) -> DiskUsage:
        """Return what happened to blocks and files since the start of the process."""
        counts = self._folder.counts
        return DiskUsage(
            is_usable=self._paused_until_s is None,
            num_written=counts.num_written,
            num_read=counts.num_read,
            num_missing=counts.num_missing,
            num_broken=counts.num_broken,
            num_dropped=self._num_dropped,
            num_failed=self._num_failed,
            num_evicted=self._folder.space.num_evicted,
        )

    def wants(self, num_bytes: int) -> bool:
        """Return whether a block of `num_bytes` should be stored, which depends on whether the thread keeps up. Only the thread
        checks whether the block has a file already, since a step must not wait for the disk."""
        if self._paused_until_s is not None and self._now_s() < self._paused_until_s:
            return False
        if self._queued_bytes + num_bytes > QUEUED_BYTES:
            self._num_dropped += 1
            return False
        return True

    def wait_until_written(self, timeout_s: float) -> None:
        """Wait until each queued block has its file or could not be written, for at most `timeout_s`."""
        with self._has_written:
            self._has_written.wait_for(lambda: not self._queued_bytes, timeout_s)

    def store(self, block: StoredBlock) -> None:
        """Queue a block to be written."""
        with self._has_written:
            self._queued_bytes += len(block.contents)
        self._writes.put(block)
        self._start("transom-disk-writes", self._write)

    def fetch(self, ticket: int, blocks: list[FetchedBlock]) -> None:
        """Begin a load from the disk, whose end is reported to the board."""
        self._board.started()
        self._fetches.put((ticket, blocks))
        self._start("transom-disk-reads", self._read)

    def close(self) -> None:
        """Write the queued blocks, and end the threads; idempotent. It waits at most `CLOSE_S`: the process may then end, and a
        later process removes files that were left unfinished."""
        self._is_closed = True
        self._writes.put(None)
        self._fetches.put(None)
        until_s = time.monotonic() + CLOSE_S
        for thread in self._threads.values():
            thread.join(max(0.0, until_s - time.monotonic()))

    def _start(self, name: str, run: Callable[[], None]) -> None:
        if name not in self._threads:
            self._threads[name] = threading.Thread(target=run, name=name, daemon=True)
            self._threads[name].start()

    def _write(self) -> None:
        while (block := self._writes.get()) is not None:
            try:
                self._folder.write(block.group, block.digest, block.contents)
                self._works_again()
            except OSError as error:
                self._pause(error)
            except Exception as error:  # a bug must not end the thread, or blocks would wait in memory forever
                logger.exception("A block could not be written to the disk cache.")
                self._pause(error)
            finally:
                with self._has_written:
                    self._queued_bytes -= len(block.contents)
                    self._has_written.notify()

    def _pause(self, error: Exception) -> None:
        """Count a failed write, and write nothing for `PAUSE_S`; the first failure of an outage is logged."""
        self._num_failed += 1
        if self._paused_until_s is None:
            logger.error(
                "The disk cache cannot be written: %s. Blocks that leave the memory are dropped until it can.", error
            )
        self._paused_until_s = self._now_s() + PAUSE_S

    def _works_again(self) -> None:
        if self._paused_until_s is not None and self._now_s() >= self._paused_until_s:
            logger.info("The disk cache can be written again.")
            self._paused_until_s = None

    def _read(self) -> None:
        try:
            while (load := self._fetches.get()) is not None and not self._is_closed:
                ticket, blocks = load
                begin_s = time.perf_counter()
                if self._read_all(blocks):
                    self._board.ended(ticket, time.perf_counter() - begin_s)
                else:
                    self._board.failed(ticket)
        # The rank must learn of any error, and no request may wait for this load forever.
        except BaseException as error:
            self._board.broke(error)

    def _read_all(self, blocks: Sequence[FetchedBlock]) -> bool:
        """Read blocks into their targets until one is missing; return whether all were there."""
        for group, digest, target in blocks:
            contents = self._folder.read(group, digest, target.numel())
            if contents is None:
                return False
            target.numpy()[...] = memoryview(contents)
        return True
