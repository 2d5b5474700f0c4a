"""`Exports`: lends cached blocks of a prefix to another worker while that worker reads their bytes (an *export*).

    export = exports.begin(chain, hit)    # reference the blocks of a hit, on the device or in the host tier
    ...                                   # another worker reads `export.blocks`
    exports.end(export)                   # release the references

In between the blocks are not evicted, and compaction (moving blocks together to clear a page) does not move them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from transom_core.kv_cache.prefix_search import PrefixHit, needed_blocks
from transom_core.kv_cache.retention_set import RetentionSet
from transom_core.kv_cache.tiers import DEVICE, HOST
from transom_worker.kvcache.blocks.block_copies import CopyQueue
from transom_worker.kvcache.blocks.block_registry import BlockRegistry
from transom_worker.kvcache.tiers.host_tier import HostTier


class ExportedBlock(NamedTuple):
    """A block to read: its group, its logical index in the prefix, its tier, and its id there."""

    group: int
    logical: int
    tier: int
    block: int


@dataclass(slots=True, eq=False)
class BlockExport:
    """The blocks of one export. `is_void` is set when the cache is emptied: then the blocks' contents are not valid any more."""

    blocks: list[ExportedBlock]
    is_void: bool = False


@dataclass(slots=True, eq=False)
class Exports:
    """Begins and ends exports; `opened` has those that have not ended. `registry` is the device's."""

    retentions: RetentionSet
    registry: BlockRegistry
    host: HostTier
    copies: CopyQueue
    opened: list[BlockExport] = field(default_factory=list)
    num_left_device: int = 0  # blocks on the device that ended exports referenced, since start

    def begin(
        self, chain: Sequence[bytes], hit: PrefixHit, retentions: RetentionSet | None = None, *, num_held: int = 0
    ) -> BlockExport | None:
        """Reference the blocks of a hit, and return the export; None if a queued copy has yet to write one of these blocks.

        `retentions` say which blocks the hit needs; None: those of sequences without a KV policy. `num_held` is explained in
        `needed_blocks`.
        """
        block_size = self.registry.block_size
        blocks = [
            self._found(group, digest, logical)
            for group, retention in enumerate(retentions or self.retentions)
            for digest, logical in needed_blocks(retention, chain, hit, block_size=block_size, num_held=num_held)
        ]
        return self.lend(blocks)

    def lend(self, blocks: list[ExportedBlock]) -> BlockExport | None:
        """Reference cached blocks of any prefixes. Return what `begin` does."""
        to_be_written = {(one.target_tier, one.group, one.target) for one in self.copies.waiting}
        if to_be_written and any((one.tier, one.group, one.block) in to_be_written for one in blocks):
            return None
        opened = BlockExport(blocks)
        on_device, in_host = _ids_by_group(blocks)
        for group, ids in on_device.items():
            self.registry.ref(group, ids)
        for group, ids in in_host.items():
            self.host.need(group, ids)
        self.opened.append(opened)
        return opened

    def end(self, opened: BlockExport) -> None:
        """Release the references of an export."""
        self.opened.remove(opened)
        on_device, in_host = _ids_by_group(opened.blocks)
        self.num_left_device += sum(map(len, on_device.values()))
        for group, ids in on_device.items():
            self.registry.unref(group, ids)
        for group, ids in in_host.items():
            self.host.release(group, ids)

    @property
    def reads_device(self) -> bool:
        """Whether exports reference blocks on the device."""
        return any(True for _ in self.on_device())

    def on_device(self) -> Iterable[tuple[int, int]]:
        """Yield (group, block) of every block on the device that an export reads."""
        for opened in self.opened:
            for one in opened.blocks:
                if one.tier == DEVICE:
                    yield one.group, one.block

    def make_void(self) -> None:
        """Note that the cache was emptied: the blocks of open exports do not have the promised contents any more."""
        for opened in self.opened:
            opened.is_void = True

    def _found(self, group: int, digest: bytes, logical: int) -> ExportedBlock:
        """Return where a block of a hit is: on the device, or else in the host tier."""
        block = self.registry.index.groups[group].get(digest)
        if block is not None:
            return ExportedBlock(group, logical, DEVICE, block)
        return ExportedBlock(group, logical, HOST, self.host.blocks[group][digest])


def _ids_by_group(blocks: Iterable[ExportedBlock]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Return the ids of the blocks on the device, and of those in the host tier, by their groups."""
    on_device: dict[int, list[int]] = {}
    in_host: dict[int, list[int]] = {}
    for group, _, tier, block in blocks:
        (on_device if tier == DEVICE else in_host).setdefault(group, []).append(block)
    return on_device, in_host
