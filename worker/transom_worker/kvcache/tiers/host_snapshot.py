"""`HostSnapshots`: makes cheap copies of the host tier's state for the block map (a view of every block), as `cache_snapshot` does
for the device.

A host tier may have a hundred times as many blocks as the device. So the first copy is made in pieces of a few pages, and steps can
run between two pieces. Later snapshots have only the blocks that changed. The lists of blocks of loads, imports and exports never
change, so a snapshot refers to them instead of copying them. A *leftover* is a host block in the index that nothing needs
(`host_tier`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transom_worker.kvcache.blocks.block_copies import BlockCopy
from transom_worker.kvcache.tiers.exports import ExportedBlock
from transom_worker.kvcache.tiers.imports import ImportedBlock
from transom_worker.kvcache.tiers.tiers import Tiers

BLOCKS_PER_COPY = 2**14  # of one piece of the first copy, which the engine's thread makes between two steps


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroupChanges:
    """Those of one group's blocks that may have changed since the last snapshot, or that no snapshot had yet."""

    blocks: list[int]  # ids, in the order of `needs` and `leftover`
    needs: list[int]  # how often the block is needed (`host_tier`)
    leftover: list[bool]  # whether the block is in the index and nothing needs it
    moved: list[int]  # those of `blocks` that have moved to the device since the last snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSnapshot:
    """The host tier at one moment: changed blocks, and the loads, imports and exports that need some of its blocks.

    Nodes of the prefix tree and swapped sequences need blocks too; they are not listed here.
    """

    free_pages: int
    groups: tuple[HostGroupChanges, ...]
    loads: list[Sequence[BlockCopy]]  # copies to the device that the ranks have not reported yet
    imports: list[Sequence[ImportedBlock]]
    exports: list[Sequence[ExportedBlock]]
    # Blocks since start, by kind and group: spilled, loaded, swapped, imported, and dropped (evicted).
    moves: dict[str, list[int]]


class HostSnapshots:
    """Takes snapshots of one host tier. All calls are made on the engine's thread, in this order:

    device_snapshots.begin()      both tiers record from now on which blocks change
    copy(pages)                   once for each of `pieces`
    take()                        as often as needed
    device_snapshots.end()
    """

    def __init__(self, tiers: Tiers) -> None:
        self.layout = tiers.host.layout
        self._tiers = tiers
        self._host = tiers.host

    @property
    def pieces(self) -> list[range]:
        """The pages in pieces of about `BLOCKS_PER_COPY` blocks."""
        layout = self.layout
        # At least one page, even if a page has more than `BLOCKS_PER_COPY` blocks.
        step = max(1, BLOCKS_PER_COPY // sum(map(layout.blocks_per_page, range(len(layout.groups)))))
        return [range(first, min(first + step, layout.num_pages)) for first in range(0, layout.num_pages, step)]

    def copy(self, pages: range) -> list[HostGroupChanges]:
        """Return all blocks in these pages, by group."""
        first, last = pages.start, pages.stop - 1
        return [
            self._changes(group, range(self.layout.first_block(first, group), self.layout.end_block(last, group)))
            for group in range(len(self._host.pools))
        ]

    def take(self) -> HostSnapshot:
        """Return what changed since the last call, or since `begin`."""
        tiers = self._tiers
        touched, moved = self._host.registry.take_touched()
        return HostSnapshot(
            free_pages=self._host.arena.num_free,
            groups=tuple(self._changes(group, touched[group], moved[group]) for group in range(len(self._host.pools))),
            loads=[load.copies for load in tiers.loads.by_ticket.values()],
            imports=[opened.blocks for opened in tiers.imports.opened],
            exports=[opened.blocks for opened in tiers.exports.opened],
            moves={
                "spilled": tiers.moves.num_spilled.copy(),
                "loaded": tiers.loads.num_loaded.copy(),
                "swapped": self._host.num_swapped_out.copy(),
                "imported": tiers.imports.num_imported.copy(),
                "dropped": [sum(reasons.values()) for reasons in self._host.registry.num_evicted()],
            },
        )

    def _changes(self, group: int, blocks: Iterable[int], moved: Iterable[int] = ()) -> HostGroupChanges:
        pool, blocks = self._host.pools[group], list(blocks)
        return HostGroupChanges(
            blocks=blocks,
            needs=list(map(pool.refs.__getitem__, blocks)),
            leftover=list(map(pool.evictable.__contains__, blocks)),
            moved=list(moved),
        )
