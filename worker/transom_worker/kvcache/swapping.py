"""`Swapping`: keeps the blocks of preempted sequences in the host tier, so that they need not be computed again.

A sequence is swapped out with its live blocks alone: of a window group its window, and nothing behind the tokens that have been
processed. The copies belong to the sequence and are not in the index, so nothing evicts them. It is swapped in by a load (`loads`),
into tables with a hole for each block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transom_worker.kvcache.block_copies import CopyQueue
from transom_worker.kvcache.block_table import HOLE, BlockTable
from transom_worker.kvcache.host_tier import HostTier
from transom_worker.kvcache.sequence import SequenceBlocks
from transom_worker.kvcache.tiers import DEVICE, HOST

MakeRoom = Callable[[Callable[[], Sequence[int]]], bool]  # for so many blocks of each group; False: there is none


class Swapping:
    """Swapped sequences, and what they hold. `make_room` drops cached blocks of the host tier."""

    def __init__(self, host: HostTier, copies: CopyQueue, make_room: MakeRoom) -> None:
        self.num_swapped_out = [0] * len(host.pools)  # blocks by group, since start
        self._host = host
        self._copies = copies
        self._make_room = make_room

    def save(self, blocks: SequenceBlocks) -> bool:
        """Queue copies of a sequence's live blocks to the host; return False, with nothing changed, if there is no room, or if it
        has none: a load without copies would never be reported.

        The caller releases the blocks on the device afterwards.
        """
        live = [_live_blocks(blocks, group) for group in range(len(blocks.tables))]
        if not any(live) or not self._make_room(lambda: [len(of_group) for of_group in live]):
            return False
        blocks.to_load = self._host.take([len(of_group) for of_group in live])
        for group, (sources, targets) in enumerate(zip(live, blocks.to_load, strict=True)):
            self.num_swapped_out[group] += len(sources)
            for source, target in zip(sources, targets, strict=True):
                self._copies.add(group, source, target, source_tier=DEVICE, target_tier=HOST)
        return True

    def make_holes(self, blocks: SequenceBlocks, *, block_size: int) -> None:
        """Give a swapped sequence tables with a hole for each block that it has in the host tier."""
        tables = []
        for old, saved in zip(blocks.tables, blocks.to_load, strict=True):
            table = BlockTable(num_sink_blocks=old.num_sink_blocks, first_block=old.first_block)
            table.append([HOLE] * len(saved))
            tables.append(table)
        blocks.tables = tables
        blocks.tables_changed = True
        blocks.capacity_tokens = -(-blocks.processed // block_size) * block_size


def num_live_blocks(blocks: SequenceBlocks) -> list[int]:
    """Return how many blocks of each group swapping a sequence out copies."""
    return [len(_live_blocks(blocks, group)) for group in range(len(blocks.tables))]


def _live_blocks(blocks: SequenceBlocks, group: int) -> list[int]:
    """Return a table's blocks that have processed tokens, in order."""
    table, end = blocks.tables[group], -(-blocks.processed // blocks.retentions[group].block_size)
    run = table.run[: max(0, end - table.first_block)]
    return [*table.sink_blocks[:end], *run]
