"""`Imports`: takes blocks into which blocks from the disk or another worker are written, so that a request then hits them.

Blocks of another worker are written where they will be used, on the device, if active blocks leave room for all of them; else, and
from the disk, into the host tier. Either way cached blocks of other prefixes are evicted as needed.

    opened = imports.begin(chain, hit)    # take blocks for what the cache lacks of a prefix; they are not in the index
    ...                                   # bytes are written into them
    imports.publish(opened)               # enter them into the index; the import still needs them, so that they are not evicted
                                          # before the request that waits for them is admitted (`KeptImports`)
    imports.end(opened)                   # give them back: published blocks may be evicted from now on, others are free

In between, the part of the prefix that the cache already has must not be evicted to make room for the missing blocks. So its
deepest node in the prefix tree is locked, and the import counts a need (`host_tier`) of each of its blocks in the host tier, or a
reference on the device, even of those that no node pins. On the device, requests whose blocks do not fit otherwise get those of
published imports at once.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from transom_core.client_queue import NO_CLIENT, Sharer
from transom_core.kv_cache.prefix_search import PrefixHit, needed_blocks
from transom_core.kv_cache.retention_set import RetentionSet
from transom_core.kv_cache.tiers import DEVICE, DISK, HOST
from transom_worker.kvcache.blocks.block_copies import BlockCopy, CopyQueue
from transom_worker.kvcache.blocks.block_registry import BlockRegistry
from transom_worker.kvcache.prefix.tree import Node
from transom_worker.kvcache.tiers.host_tier import HostTier

MAX_KEPT_S = 60.0
MAX_AWAITED_S = 1.0  # a request follows the blocks of its prompt in a few hundredths of a second

# Makes room for as many blocks of each group as the given function returns; returns False if that is impossible.
MakeRoom = Callable[[Callable[[], Sequence[int]]], bool]
TakeBlocks = Callable[[Sequence[int]], list[list[int]] | None]  # takes blocks of the device; None: they do not fit
LockPrefix = Callable[[Sequence[bytes], int], Node | None]  # locks the deepest node of a chain's first n hash blocks
UnlockPrefix = Callable[[Node], None]


class ImportedBlock(NamedTuple):
    """A block to write: its group, its logical index in the prefix, its digest, and its id in the import's tier."""

    group: int
    logical: int
    digest: bytes
    block: int


@dataclass(slots=True, eq=False)
class BlockImport:
    """The blocks of one import, which are in `tier`.

    `locked` is the node that the import keeps locked. `cached` has, by tier and group, the prefix's blocks that the import keeps
    there. `is_void` is set when the cache is emptied or the import is given up: then the blocks must not be published. `ticket`
    names the load from the disk that writes the blocks; 0: another worker's bytes are written.
    """

    blocks: list[ImportedBlock]
    locked: Node | None
    cached: tuple[list[list[int]], list[list[int]]]
    tier: int = HOST
    is_void: bool = False
    ticket: int = 0
    is_published: bool = False

    def by_group(self) -> dict[int, list[ImportedBlock]]:
        """Return the blocks by their groups."""
        found: dict[int, list[ImportedBlock]] = {}
        for one in self.blocks:
            found.setdefault(one.group, []).append(one)
        return found

    @property
    def is_fetching(self) -> bool:
        """Whether a load from the disk writes the blocks."""
        return self.ticket > 0 and not self.is_published


@dataclass(slots=True, kw_only=True, eq=False)
class Imports:
    """Begins, publishes and ends imports; `opened` has those that have not ended.

    `registry` is the device's. `make_room` drops cached blocks of the host tier; `take_blocks` evicts those of the device. `lock`
    and `unlock` protect the cached part of a prefix to which an import adds blocks.
    """

    retentions: RetentionSet
    registry: BlockRegistry
    host: HostTier
    copies: CopyQueue
    make_room: MakeRoom
    take_blocks: TakeBlocks
    lock: LockPrefix
    unlock: UnlockPrefix
    num_imported: Counter[int] = field(default_factory=Counter)  # blocks published by group, since start
    opened: list[BlockImport] = field(default_factory=list)
    num_left_device: int = 0  # blocks of the device that imports have given back, since start

    def begin(
        self,
        chain: Sequence[bytes],
        hit: PrefixHit,
        retentions: RetentionSet | None = None,
        *,
        with_windows: bool = True,
        on_device: bool = False,
    ) -> BlockImport | None:
        """Take blocks for those blocks of a hit on the disk or at another worker that neither device nor host has here.

        They are taken from the device if `on_device` and they fit beside the active blocks. Else they are taken from the host tier,
        whose nodes are dropped to make room, except those of this prefix. Return None if no block is missing (`lacks_any`), or
        there is still no room. Without `with_windows` only blocks of groups that keep every token are taken. `retentions` say which
        blocks the hit needs; None: those of sequences without a KV policy. Copies that are queued now may still read the taken
        blocks, so the caller must write the contents after these copies. Then it must call `publish` and `end`, or `end` alone.
        """
        if not self.host.exists:
            return None
        locked = self.lock(chain, hit.num_hash_blocks)
        needed = self._needed(chain, hit, retentions, with_windows=with_windows)
        in_host = _found(needed, self.host.blocks)
        for group, ids in enumerate(in_host):
            self.host.need(group, ids)
        missing = [
            [name for name in names if not self.registry.index.has(group, name[0])]
            for group, names in enumerate(needed)
        ]
        counts = [len(of_group) for of_group in missing]
        on_device_ids: list[list[int]] = []
        taken = None
        if on_device and any(counts):
            on_device_ids = _found(needed, self.registry.index.groups)
            for group, ids in enumerate(on_device_ids):
                self.registry.ref(group, ids)
            taken = self.take_blocks(counts)
        cached, tier = (on_device_ids, in_host), HOST if taken is None else DEVICE
        if taken is None:
            if not (any(counts) and self.make_room(lambda: counts)):
                self._stop_keeping(cached, locked)
                return None
            taken = self.host.take(counts)
        blocks = [
            ImportedBlock(group, logical, digest, block)
            for group, (names, of_group) in enumerate(zip(missing, taken, strict=True))
            for (digest, logical), block in zip(names, of_group, strict=True)
        ]
        opened = BlockImport(blocks, locked, cached, tier)
        self.opened.append(opened)
        return opened

    def awaits_copies(self, opened: BlockImport) -> bool:
        """Return whether queued copies, which no plan carries yet, read or write any page of an import's blocks. Bytes that come
        before these copies would be copied instead of what the page had, whichever group's it was."""
        arena = self.registry.arena if opened.tier == DEVICE else self.host.arena
        pages = {
            arena.page_of(copy.group, block)
            for copy in self.copies.waiting
            for tier, block in ((copy.source_tier, copy.source), (copy.target_tier, copy.target))
            if tier == opened.tier
        }
        return any(arena.page_of(one.group, one.block) in pages for one in opened.blocks)

    def lacks_any(
        self, chain: Sequence[bytes], hit: PrefixHit, retentions: RetentionSet | None, *, with_windows: bool
    ) -> bool:
        """Return whether any block is missing that `begin` would take."""
        needed = self._needed(chain, hit, retentions, with_windows=with_windows)
        return not all(self.registry.index.has(group, name[0]) for group, names in enumerate(needed) for name in names)

    def _needed(
        self, chain: Sequence[bytes], hit: PrefixHit, retentions: RetentionSet | None, *, with_windows: bool
    ) -> list[list[tuple[bytes, int]]]:
        return [
            needed_blocks(retention, chain, hit, block_size=self.registry.block_size)
            if with_windows or retention.keeps_everything
            else []
            for retention in retentions or self.retentions
        ]

    def fetch(self, opened: BlockImport, sharer: Sharer = NO_CLIENT) -> int:
        """Queue a load of an import's blocks from the disk for its client's turns, and return its ticket."""
        copies = [BlockCopy(one.group, 0, one.block, DISK, HOST, digest=one.digest) for one in opened.blocks]
        opened.ticket = self.copies.add_load(copies, sharer)
        return opened.ticket

    @property
    def is_fetching(self) -> bool:
        """Whether an import waits for a load from the disk, so that plans must go to the ranks even if no sequence can be
        computed."""
        return any(opened.is_fetching for opened in self.opened)

    @property
    def is_waiting(self) -> bool:
        """Whether an import of another worker's blocks waits for queued copies, so that a plan must carry these."""
        return any(not (one.is_published or one.ticket) and self.awaits_copies(one) for one in self.opened)

    def publish(self, opened: BlockImport) -> None:
        """Enter the blocks into the index, except those whose digests entered it meanwhile; do nothing if the import is void."""
        opened.is_published = True
        if opened.is_void:
            return
        registry = self.registry if opened.tier == DEVICE else self.host.registry
        for group, blocks in opened.by_group().items():
            new = [one for one in blocks if not self.registry.index.has(group, one.digest)]
            registry.enter(group, [one.block for one in new], [(one.digest, one.logical) for one in new])
            self.num_imported[group] += len(new)

    def give_up(self, opened: BlockImport) -> None:
        """Give an import up: its blocks will not be published, and the rest of the prefix in the cache may be evicted again.

        The blocks stay taken until `end`, since bytes may still be written into them.
        """
        opened.is_void = True
        self.num_left_device += sum(map(len, opened.cached[DEVICE]))
        self._stop_keeping(opened.cached, opened.locked)
        opened.cached, opened.locked = ([], []), None

    def end(self, opened: BlockImport) -> None:
        """Give the blocks back: published ones may be evicted from now on, others are free."""
        self.opened.remove(opened)
        self.num_left_device += _num_on_device(opened)
        give_back = self.registry.unref if opened.tier == DEVICE else self.host.release
        for group, blocks in opened.by_group().items():
            give_back(group, [one.block for one in blocks])
        self._stop_keeping(opened.cached, opened.locked)

    def leave_device(self) -> bool:
        """Give what published imports keep on the device back before their ends; return whether there was anything."""
        kept = [one for one in self.opened if one.is_published and _num_on_device(one)]
        for opened in kept:
            self.num_left_device += _num_on_device(opened)
            for group, ids in _on_device(opened):
                self.registry.unref(group, ids)
            opened.cached = ([], opened.cached[HOST])
            if opened.tier == DEVICE:
                opened.blocks = []
        return bool(kept)

    def on_device(self) -> Iterable[tuple[int, int]]:
        """Yield (group, block) of every block on the device that an import holds."""
        for opened in self.opened:
            for group, ids in _on_device(opened):
                yield from ((group, block) for block in ids)

    def _stop_keeping(self, cached: tuple[list[list[int]], list[list[int]]], locked: Node | None) -> None:
        """Remove the import's references, needs and lock, so that the part of the prefix that was cached before may be evicted
        again."""
        for give_back, by_group in zip((self.registry.unref, self.host.release), cached, strict=True):
            for group, ids in enumerate(by_group):
                give_back(group, ids)
        if locked is not None:
            self.unlock(locked)

    def num_held(self, group: int) -> int:
        """Return how many blocks of a group the imports hold in the host tier now."""
        return sum(one.group == group for opened in self.opened if opened.tier == HOST for one in opened.blocks)

    def num_coming(self, group: int) -> int:
        """Return how many blocks of a group on the device are taken for bytes that have not come, so that nothing can take them."""
        coming = (opened for opened in self.opened if opened.tier == DEVICE and not opened.is_published)
        return sum(one.group == group for opened in coming for one in opened.blocks)

    def make_void(self) -> None:
        """Mark all open imports so that they publish nothing, because the cache is emptied."""
        for opened in self.opened:
            opened.is_void = True


def _found(needed: Sequence[list[tuple[bytes, int]]], groups: Sequence[Mapping[bytes, int]]) -> list[list[int]]:
    """Return the ids of those of the needed blocks that a tier has, by group."""
    return [
        [block for digest, _ in names if (block := found.get(digest)) is not None]
        for names, found in zip(needed, groups, strict=True)
    ]


def _on_device(opened: BlockImport) -> Iterable[tuple[int, list[int]]]:
    """Yield (group, blocks) for the blocks on the device that an import holds."""
    yield from enumerate(opened.cached[DEVICE])
    if opened.tier == DEVICE:
        yield from ((group, [one.block for one in blocks]) for group, blocks in opened.by_group().items())


def _num_on_device(opened: BlockImport) -> int:
    return sum(len(ids) for _, ids in _on_device(opened))


@dataclass(slots=True)
class _Kept:
    """A published import, the requests that it is kept for, and the times of the clock at which it ends in any case and up to which
    another request is awaited."""

    blocks: BlockImport
    request_ids: set[str]
    until_s: float
    awaited_until_s: float


class KeptImports:
    """Keeps the complete imports of one engine until the requests for which they were made are admitted.

    No node pins a published import, so that other blocks could evict it while its request still waits. A kept import is not evicted
    until every request that it is kept for is admitted or has ended, or until `MAX_KEPT_S` have passed. The limit keeps a request
    that waits for long from blocking a tier for all others; it may have to compute its prefix then.
    `is_waiting` returns whether the request with an id still waits for admission; `clock` gives seconds.
    """

    def __init__(self, imports: Imports, *, is_waiting: Callable[[str], bool], clock: Callable[[], float]) -> None:
        self._imports, self._is_waiting, self._clock = imports, is_waiting, clock
        self._kept: list[_Kept] = []

    def publish(self, blocks: BlockImport, request_ids: Iterable[str], *, is_awaited: bool = False) -> None:
        """Publish an import that is complete, and keep it for these requests; `is_awaited`: also for one that is not here yet."""
        self._imports.publish(blocks)
        now_s = self._clock()
        self._kept.append(_Kept(blocks, set(request_ids), now_s + MAX_KEPT_S, now_s + MAX_AWAITED_S * is_awaited))
        self.end_admitted()

    def join(self, request_id: str, chain: Iterable[bytes]) -> None:
        """Keep the imports that brought blocks of this chain for one more request."""
        wanted = set(chain)
        for one in self._kept:
            found = [block.digest in wanted for block in one.blocks.blocks]
            if any(found):
                one.request_ids.add(request_id)
            if all(found):  # the awaited request; others share a part, such as the system prompt
                one.awaited_until_s = 0.0

    def end_admitted(self) -> None:
        """End the imports that no request waits for any more, and those that were kept for long enough."""
        now_s, kept = self._clock(), []
        for one in self._kept:
            is_waited_for = now_s < one.awaited_until_s or any(map(self._is_waiting, one.request_ids))
            if now_s < one.until_s and is_waited_for:
                kept.append(one)
            else:
                self._imports.end(one.blocks)
        self._kept = kept

    def forget(self) -> None:
        """End all kept imports, because the cache is emptied."""
        for one in self._kept:
            self._imports.end(one.blocks)
        self._kept = []
