"""`Tiers`: the parts of a KV cache besides the device: its host tier, its disk tier, and the exchange with other workers.

    host       the host's arena: pages, blocks, and how often each block is needed
    moves      moves nodes of the prefix tree between device and host
    loads      brings blocks from the host to sequences on the device
    imports    brings blocks from the disk or other workers into the host tier, or from other workers into free pages of the device
    exports    lends blocks to other workers
    stores     writes the blocks of dropped nodes to files
    disk       the digests of the blocks that have files

Every part always exists. Without a host tier the host's arena has no pages (`HostTier.exists`): no block is found there or fits,
and no load, import or swap begins. Without a disk tier no block is stored (`DiskStores.is_on`) or found there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transom_core.kv_cache.layout import ArenaLayout
from transom_worker.kvcache.stats import HostGroupStats
from transom_worker.kvcache.tiers.disk.index import DiskIndex, DiskStores
from transom_worker.kvcache.tiers.exports import Exports
from transom_worker.kvcache.tiers.host_tier import HostTier
from transom_worker.kvcache.tiers.imports import Imports
from transom_worker.kvcache.tiers.loads import Loads
from transom_worker.kvcache.tiers.tier_moves import TierMoves


@dataclass(slots=True, kw_only=True, eq=False)
class Tiers:
    """The tiers of one cache; the module's docstring says what each part does."""

    host: HostTier
    moves: TierMoves
    loads: Loads
    imports: Imports
    exports: Exports
    stores: DiskStores
    disk: DiskIndex

    def open_disk(self, layout: ArenaLayout) -> None:
        """From now on store the blocks of dropped nodes on the disk, and let searches find the blocks in `disk`.

        Without a host tier (`rates` is None) searches do not find them: blocks are read from the disk into the host tier only.
        """
        self.stores.is_on = True
        changes = self.host.registry.changes
        if changes.rates is not None:
            self.disk.open(changes)
            strides = [group.stride_bytes for group in layout.groups]
            changes.set_rates(changes.rates.with_unmeasured_reads(strides))

    def fixed_blocks(self) -> Iterable[tuple[int, int]]:
        """Yield (group, block) of the device's blocks that must stay where they are: exports read them, or loads or imports write
        them."""
        yield from self.exports.on_device()
        yield from self.loads.targets()
        yield from self.imports.on_device()

    @property
    def others_hold_device(self) -> bool:
        """Whether exports or imports hold blocks on the device, which preempting sequences does not free."""
        return self.exports.reads_device or any(True for _ in self.imports.on_device())

    def lose_contents(self) -> None:
        """Empty the host tier, and make running loads, imports and exports void, because the cache is emptied."""
        self.exports.make_void()
        self.loads.make_void()
        self.imports.make_void()
        self.host.empty("reset")

    def host_stats(self, names: Sequence[str]) -> tuple[HostGroupStats, ...]:
        """Return the blocks of each group in the host tier, and how many have moved since start; `names` are the groups'."""
        evicted = self.host.registry.num_evicted()
        return tuple(
            HostGroupStats(
                name=name,
                cached_blocks=len(pool.published),
                other_blocks=pool.num_active + len(pool.evictable) - len(pool.published),
                free_blocks=pool.num_free,
                spilled_blocks=self.moves.num_spilled[group],
                loaded_blocks=self.loads.num_loaded[group],
                swapped_blocks=self.host.num_swapped_out[group],
                held_blocks=self.imports.num_held(group),
                imported_blocks=self.imports.num_imported[group],
                evicted_blocks=evicted[group],
            )
            for group, (name, pool) in enumerate(zip(names, self.host.pools, strict=True))
        )
