"""Owns one rank's tiers of KV memory, and moves blocks between them (`RankTiers`).

    tier     the device's slab, the host's slab (the same groups and blocks, but another number of them), or the files on disk
    ticket   0: a copy that is done before the plan's forward pass. Above 0: a *load*, which runs beside this step and later ones
    piece    the blocks that one `read` or `write` moves: one, or at most `PIECE_BYTES`, so that steps wait only a moment

A plan's copies are made once, even if the plan fails or is dropped: `run` may be called again for the same plan.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from transom_core.config import CacheConfig
from transom_core.contract.kv_transfer import PIECE_BYTES, RankMemory
from transom_core.errors import ConfigError, StepFailed, TransomError
from transom_core.kv_cache.layout import ArenaLayout
from transom_kernels.block_copy import block_copy, block_copy_between
from transom_worker.execution.executor import DiskUsage, ReadEnd, RemoteRead
from transom_worker.execution.tiers.disk_blocks import DiskTier, FetchedBlock, StoredBlock
from transom_worker.execution.tiers.load_copies import EndedLoads, LoadBoard, RowCopies, make_loads
from transom_worker.execution.tiers.remote_reads import RemoteReads
from transom_worker.execution.tiers.slabs import TierMemory
from transom_worker.kvcache.tiers.disk.folder import HEADER_BYTES, BlockFolder
from transom_worker.scheduling.step import LOAD_WAIT_S, TIER_DEVICE, TIER_DISK, TIER_HOST, StepPlan

DISK_WAIT_S = 2.0  # the longest time that a plan with `waits_for_disk` waits for its files


class _Copy(NamedTuple):
    """A copy of block `source` to block `target`. In the disk tier, the number is an index of the plan's `disk_digests`."""

    group: int
    source_tier: int
    source: int
    target_tier: int
    target: int
    ticket: int


class RankTiers:
    """The tiers of one rank. Only the rank's thread calls it."""

    def __init__(
        self,
        memories: Mapping[int, TierMemory],
        disk_folder: BlockFolder | None = None,
        remote: RemoteReads | None = None,
    ) -> None:
        """`memories` maps TIER_DEVICE, and TIER_HOST if there is a host tier, to their memory. `remote` reads other workers'."""
        self._memories, self._remote = memories, remote
        self._device = memories[TIER_DEVICE].slab.device
        self._board = LoadBoard()
        self._loads = make_loads(self._board, self._device)
        self._disk = None if disk_folder is None else DiskTier(disk_folder, self._board)
        self._last_plan: StepPlan | None = None

    @property
    def device(self) -> TierMemory:
        """Return the memory of the device tier, which forward passes read and write."""
        return self._memories[TIER_DEVICE]

    def compile_copies(self) -> None:
        """Copy block 0 of each group onto itself, and to the host tier and back, before anything is stored, so that copy kernels
        are compiled now and no request waits for that."""
        host = self._memories.get(TIER_HOST)
        for group in range(len(self.device.layout.groups)):
            rows = self._rows(TIER_DEVICE, group)
            block_copy(rows, [(0, 0)])
            if host is not None:
                block_copy_between(rows, self._rows(TIER_HOST, group), [(0, 0)])
                block_copy_between(self._rows(TIER_HOST, group), rows, [(0, 0)])

    def run(self, plan: StepPlan) -> int:
        """Make a plan's copies and begin its loads, unless that is done already; return the number of copies.

        Raises:
            StepFailed: a copy cannot be made. The tiers' contents are unknown then, so the rank must end.
        """
        if plan is self._last_plan:
            return 0
        self._last_plan = plan
        copies = list(_copies_of(plan))
        try:
            self._copy_now([copy for copy in copies if not copy.ticket], plan.disk_digests)
            for ticket, load in groupby((copy for copy in copies if copy.ticket), key=lambda copy: copy.ticket):
                self._begin(ticket, list(load), plan.disk_digests)
            if plan.waits_for_disk:
                self._disk_tier().wait_until_written(DISK_WAIT_S)
        except Exception as error:
            if isinstance(error, TransomError):
                raise
            raise StepFailed(
                f"The block copies of step {plan.step_id} failed: {type(error).__name__}: {error}"
            ) from error
        return len(copies)

    def ended_loads(self, *, wait: bool = False) -> EndedLoads:
        """Return the loads that have ended since the last call. With `wait`, wait up to `LOAD_WAIT_S` for one if any is in flight.

        Raises:
            StepFailed: a copy of a load raised an exception.
        """
        self._loads.poll(wait=wait)
        if wait:
            self._board.wait(LOAD_WAIT_S)
        return self._board.take()

    @torch.inference_mode()
    def read(self, tier: int, group: int, blocks: Sequence[int]) -> bytes:
        """Return the contents of blocks, one after the other, each with this rank's `block_bytes`.

        Raises:
            ValueError: there is no such tier, group or block, or the piece is too large.
        """
        rows, ids = self._piece(tier, group, blocks)
        self._finish_spills()
        return rows.index_select(0, ids).cpu().numpy().tobytes()

    @torch.inference_mode()
    def write(self, tier: int, group: int, blocks: Sequence[int], data: bytes | memoryview) -> None:
        """Write contents, in the format of `read`, into blocks.

        Raises:
            ValueError: there is no such tier, group or block, the piece is too large, or the data has another length.
        """
        rows, ids = self._piece(tier, group, blocks)
        wanted = len(blocks) * rows.shape[1]
        if len(data) != wanted:
            raise ValueError(
                f"{len(blocks)} blocks of group {group} take {wanted} bytes on this rank, not {len(data)}."
            )
        if blocks:
            self._finish_spills()
            new = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(len(blocks), rows.shape[1])
            rows[ids] = new.to(rows.device)

    @property
    def shared_memories(self) -> tuple[RankMemory, ...]:
        """Return what other workers' ranks need to read this rank's memory, alone in a tuple; empty if they cannot."""
        return () if self._remote is None else (self._remote.memory,)

    def begin_read(self, read: RemoteRead) -> None:
        """Begin a read of another worker's memory; this rank must have `shared_memories`."""
        assert self._remote is not None
        self._finish_spills()  # copies that were decided before may still use the blocks that are read into
        self._remote.begin(read)

    def on_read_end(self, callback: Callable[[ReadEnd], None]) -> None:
        """Have `callback` called, on another thread, for each read that is over."""
        if self._remote is not None:
            self._remote.on_end = callback

    def close(self) -> None:
        """Wait for the running load, drop the loads after it, and write the blocks that are queued for the disk; idempotent."""
        try:
            if self._remote is not None:
                self._remote.close()
        finally:  # what NIXL raises must cost no queued blocks
            self._loads.close()
            if self._disk is not None:
                self._disk.close()

    @property
    def disk_usage(self) -> DiskUsage | None:
        """Return what happened to the disk tier's blocks and files; None without a disk tier."""
        return None if self._disk is None else self._disk.usage

    def _copy_now(self, copies: list[_Copy], digests: Sequence[bytes]) -> None:
        # The order across groups matters: copies may empty a page which is then the target of another group's copies. So only
        # consecutive copies of one group between the same tiers are made together.
        for (group, source_tier, target_tier), run in groupby(copies, key=_ends):
            pairs = [(copy.source, copy.target) for copy in run]
            if target_tier == TIER_DISK:
                self._store(source_tier, group, [(block, digests[index]) for block, index in pairs])
            elif source_tier == target_tier:
                if source_tier != TIER_DEVICE:
                    self._finish_spills()  # the CPU makes this copy, and a GPU may still be writing its sources
                block_copy(self._rows(source_tier, group), pairs)
            else:
                block_copy_between(self._rows(source_tier, group), self._rows(target_tier, group), pairs)

    def _begin(self, ticket: int, copies: list[_Copy], digests: Sequence[bytes]) -> None:
        if copies[0].source_tier == TIER_DISK:
            self._fetch(ticket, copies, digests)
            return
        by_group: list[RowCopies] = []
        for (group, source_tier, target_tier), run in groupby(copies, key=_ends):
            source, target = self._rows(source_tier, group), self._rows(target_tier, group)
            pairs = [(copy.source, copy.target) for copy in run]
            _check_ids(source, target, pairs)
            by_group.append(RowCopies(source, target, pairs))
        self._loads.start(ticket, by_group)

    def _store(self, tier: int, group: int, blocks: list[tuple[int, bytes]]) -> None:
        """Hand the contents of blocks to the disk tier, which writes them later."""
        rows, disk = self._contents(tier, group), self._disk_tier()
        _check_ids(rows, rows, [(block, block) for block, _ in blocks])
        wanted = [(block, digest) for block, digest in blocks if disk.wants(rows.shape[1])]
        if wanted:
            self._finish_spills()
        for block_bytes, (_, digest) in zip(_bytes_of(rows, tier, [block for block, _ in wanted]), wanted, strict=True):
            disk.store(StoredBlock(group, digest, block_bytes))

    def _fetch(self, ticket: int, copies: list[_Copy], digests: Sequence[bytes]) -> None:
        blocks = []
        for copy in copies:
            rows = self._contents(copy.target_tier, copy.group)
            _check_ids(rows, rows, [(copy.target, copy.target)])
            blocks.append(FetchedBlock(copy.group, digests[copy.source], rows[copy.target]))
        self._finish_spills()  # which may go to the same blocks, whose contents nothing needs any more
        self._disk_tier().fetch(ticket, blocks)

    def _disk_tier(self) -> DiskTier:
        if self._disk is None:
            raise ValueError("a copy names the disk, and this rank has no disk tier.")
        return self._disk

    def _contents(self, tier: int, group: int) -> torch.Tensor:
        """Return a group's blocks as rows of `block_bytes`, without the padding between blocks."""
        return self._rows(tier, group)[:, : self._memories[tier].layout.groups[group].block_bytes]

    def _finish_spills(self) -> None:
        """Wait for copies from a GPU to the host, which may still run, before the CPU reads or writes the host tier."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _rows(self, tier: int, group: int) -> torch.Tensor:
        if tier not in self._memories:
            raise ValueError(f"tier {tier} does not exist on this rank; it has {sorted(self._memories)}.")
        memory = self._memories[tier]
        if not 0 <= group < len(memory.layout.groups):
            raise ValueError(f"group {group} does not exist; there are {len(memory.layout.groups)}.")
        return memory.rows(group)

    def _piece(self, tier: int, group: int, blocks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the group's blocks as rows of `block_bytes`, and the ids of the piece's blocks."""
        rows = self._contents(tier, group)
        _check_ids(rows, rows, [(block, block) for block in blocks])
        if len(blocks) > 1 and len(blocks) * rows.shape[1] > PIECE_BYTES:
            raise ValueError(
                f"{len(blocks)} blocks of {rows.shape[1]} bytes are more than a piece of {PIECE_BYTES} bytes; move them in pieces."
            )
        return rows, torch.tensor(list(blocks), dtype=torch.int64, device=rows.device)


def _bytes_of(rows: torch.Tensor, tier: int, blocks: Sequence[int]) -> Iterator[bytes]:
    """Yield the contents of blocks. From the device they are copied in pieces of `PIECE_BYTES`, since each copy waits for the
    device."""
    if tier != TIER_DEVICE:
        yield from (rows[block].numpy().tobytes() for block in blocks)
        return
    at_once = max(1, PIECE_BYTES // rows.shape[1])
    for first in range(0, len(blocks), at_once):
        ids = torch.tensor(blocks[first : first + at_once], dtype=torch.int64, device=rows.device)
        yield from (row.tobytes() for row in rows.index_select(0, ids).cpu().numpy())


def open_disk_folder(cache: CacheConfig, layout: ArenaLayout, fingerprint: bytes) -> BlockFolder:
    """Open the files of a rank's blocks in `cache.disk_cache`. Only files with this fingerprint are read.

    Raises:
        ConfigError: the directory cannot be used, or its space is smaller than a block.
    """
    assert cache.disk_cache is not None
    least = HEADER_BYTES + max(group.block_bytes for group in layout.groups)
    if cache.disk_space_bytes < least:
        raise ConfigError(
            f"--disk-space is {cache.disk_space_bytes} bytes; the file of one KV block of this model takes up to {least}. Give "
            "at least that, or leave out --disk-cache."
        )
    return BlockFolder(Path(cache.disk_cache).expanduser(), fingerprint, space_bytes=cache.disk_space_bytes)


def _copies_of(plan: StepPlan) -> Iterator[_Copy]:
    columns = (
        plan.copy_group, plan.copy_source_tier, plan.copy_source, plan.copy_target_tier, plan.copy_target, plan.copy_ticket
    )  # fmt: skip
    return (_Copy(*values) for values in zip(*columns, strict=True))


def _ends(copy: _Copy) -> tuple[int, int, int]:
    return copy.group, copy.source_tier, copy.target_tier


def _check_ids(source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    for from_id, to_id in pairs:
        if not (0 <= from_id < source.shape[0] and 0 <= to_id < target.shape[0]):
            raise ValueError(
                f"copy {from_id} -> {to_id} leaves the {source.shape[0]} and {target.shape[0]} block ids of a group."
            )
