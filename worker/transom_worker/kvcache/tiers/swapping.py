"""`Swapping`: keeps the blocks of preempted sequences in the host tier, so that they need not be computed again.

Only a sequence's live blocks are swapped out: the window in window groups, the blocks that a KV policy keeps, and none after the
processed tokens. The copies belong to the sequence and are not in the index, so nothing evicts them. It is swapped in by a load
(`loads`), into tables with a hole for each block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from transom_core.kv_cache.tiers import DEVICE, HOST
from transom_worker.kvcache.blocks.block_copies import CopyQueue
from transom_worker.kvcache.blocks.block_table import BlockTable
from transom_worker.kvcache.blocks.sequence_blocks import SequenceBlocks
from transom_worker.kvcache.tiers.host_tier import HostTier

MakeRoom = Callable[[Callable[[], Sequence[int]]], bool]  # for this many blocks of each group; False: impossible


class Swapping:
    """Swapped sequences, and what they hold. `make_room` drops cached blocks of the host tier."""

    def __init__(self, host: HostTier, copies: CopyQueue, make_room: MakeRoom) -> None:
        self.num_swapped_out = [0] * len(host.pools)  # blocks by group, since start
        self._host = host
        self._copies = copies
        self._make_room = make_room

    def save(self, blocks: SequenceBlocks) -> list[list[int]] | None:
        """Queue copies of a sequence's live blocks to the host, and return the host's blocks by group. Return None, with nothing
        changed, if there is no room, or if the sequence has no live block: a load without copies would never be reported.
        """
        live = [table.live(end) for table, end in _ends(blocks)]
        if not any(live) or not self._make_room(lambda: [len(of_group) for of_group in live]):
            return None
        saved = self._host.take([len(of_group) for of_group in live])
        for group, (sources, targets) in enumerate(zip(live, saved, strict=True)):
            self.num_swapped_out[group] += len(sources)
            for source, target in zip(sources, targets, strict=True):
                self._copies.add(group, source, target, source_tier=DEVICE, target_tier=HOST)
        return saved


def tables_with_holes(blocks: SequenceBlocks) -> list[BlockTable]:
    """Return a sequence's tables with a hole for each live block, in the order in which `Swapping.save` saves them."""
    return [table.with_holes(end) for table, end in _ends(blocks)]


def num_live_blocks(blocks: SequenceBlocks) -> list[int]:
    """Return how many blocks of each group are copied if a sequence is swapped out."""
    return [len(table.live(end)) for table, end in _ends(blocks)]


def _ends(blocks: SequenceBlocks) -> Iterator[tuple[BlockTable, int]]:
    """Yield each table of a sequence, with the end of its logical blocks that have processed tokens."""
    for retention, table in zip(blocks.retentions, blocks.tables, strict=True):
        yield table, -(-blocks.processed // retention.block_size)
