"""`DiskIndex`: the digests of the blocks that have files in the disk tier, as the last listing of the folder found them.
`DiskStores` sends the blocks of nodes that leave the cache's memory to the disk tier.

Files come and go without the cache's knowledge, since other workers on the host write and remove them too. So the index may be out
of date. If it names a file that is gone, the read fails and the prefix is computed. The index is part of the worker's prefix index:
routers receive its changes, so that their searches find what the worker's own searches find.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Literal

from transom_core.kv_cache.tiers import DISK
from transom_worker.kvcache.blocks.block_copies import CopyQueue
from transom_worker.kvcache.prefix.change_log import ChangeLog
from transom_worker.kvcache.prefix.prefix_index import PrefixIndex
from transom_worker.kvcache.prefix.tree import Node


class DiskIndex:
    """The digests with files: `groups[group]` is a dict used as an ordered set. Nothing may be added before `open`."""

    def __init__(self, num_groups: int) -> None:
        self.groups: tuple[dict[bytes, None], ...] = tuple({} for _ in range(num_groups))
        self._changes: ChangeLog | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a disk tier from which blocks are read."""
        return self._changes is not None

    def open(self, changes: ChangeLog) -> None:
        """From now on record in `changes` what is added and removed.

        `changes` numbers tiers in the order in which it gets them, so it must have those of device and host already.
        """
        self._changes = changes
        changes.add_tier(self.groups)

    @property
    def num_blocks(self) -> int:
        """The number of blocks, of all groups, that have files."""
        return sum(map(len, self.groups))

    def add(self, group: int, digests: Iterable[bytes]) -> None:
        """Note that these blocks have files."""
        found = self.groups[group]
        new = [digest for digest in dict.fromkeys(digests) if digest not in found]
        found.update(dict.fromkeys(new))
        self._note("added", group, new)

    def remove(self, group: int, digests: Iterable[bytes]) -> None:
        """Note that these blocks have no files."""
        found = self.groups[group]
        gone = [digest for digest in dict.fromkeys(digests) if digest in found]
        for digest in gone:
            del found[digest]
        self._note("removed", group, gone)

    def _note(self, action: Literal["added", "removed"], group: int, digests: list[bytes]) -> None:
        if digests and self._changes is not None:
            self._changes.add(action, DISK, group, digests)


class DiskStores:
    """Queues copies of nodes' blocks to the disk. `index` finds the blocks; `block_bytes[group]` is the size of a block.

    When a node is dropped, its blocks are free, but keep their contents until a later step or copy overwrites them. So it is enough
    to queue a copy to the disk, which the ranks make before any copy or step that comes later. Blocks that no node pins are never
    stored, since they are rarely a whole prefix that could be hit.
    """

    def __init__(self, index: PrefixIndex, copies: CopyQueue, *, block_bytes: Sequence[int]) -> None:
        self.is_on = False  # whether there is a disk tier
        self._index = index
        self._copies = copies
        self._block_bytes = block_bytes

    def store(self, node: Node, *, with_segment: bool) -> None:
        """Store a node's windows, and with `with_segment` its segment too; do nothing without a disk tier."""
        if not self.is_on:
            return
        for group, digests in chain(node.segment_blocks() if with_segment else (), node.window_blocks()):
            self._store(group, digests)

    def store_in_pieces(self, nodes: Iterable[Node], *, piece_bytes: int) -> Iterator[None]:
        """Store these nodes, and yield whenever about `piece_bytes` of copies are queued. The caller must take the queued copies
        before it continues."""
        num_queued, stored = len(self._copies.waiting), 0
        for node in nodes:
            self.store(node, with_segment=True)
            stored += sum(self._block_bytes[copy.group] for copy in self._copies.waiting[num_queued:])
            num_queued = len(self._copies.waiting)
            if stored >= piece_bytes:
                yield
                num_queued, stored = len(self._copies.waiting), 0
        if num_queued:
            yield

    def _store(self, group: int, digests: Iterable[bytes]) -> None:
        for digest in digests:
            # From the first tier that has the block: the device, or else the host.
            for tier, groups in enumerate(self._index.tiers):
                if digest in groups[group]:
                    self._copies.add_store(group, groups[group][digest], tier, digest)
                    break
