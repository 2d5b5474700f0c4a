"""Brute force for the cache's tests: layouts of every group mix, a slow hit search, and the accounting that must always hold."""

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from functools import cache as cached
from itertools import pairwise
from typing import Any

from transom_core.contract.kv_events import KvUpdate
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.layout import ArenaLayout, GroupLayout
from transom_core.kv_cache.load_rates import LoadRates
from transom_core.kv_cache.tiers import DEVICE, HOST
from transom_core.kv_cache.window_repair import repair_start
from transom_worker.kvcache.blocks.arena import FREE, Arena
from transom_worker.kvcache.blocks.block_table import HOLE, StateTable
from transom_worker.kvcache.blocks.sequence_blocks import BlocksState, SequenceBlocks
from transom_worker.kvcache.manager import KvCache
from transom_worker.kvcache.policy_retentions import BoundedRetention

BLOCK = 4

SPECS: dict[str, dict[str, Any]] = {
    "full": dict(kind=GroupKind.FULL),
    "window": dict(kind=GroupKind.WINDOW, window=10),
    "window1": dict(kind=GroupKind.WINDOW, window=1),
    "sinks_window": dict(kind=GroupKind.SINKS_WINDOW, window=7, sinks=5),
    "chunk": dict(kind=GroupKind.CHUNK, chunk=12),
    "convolution": dict(kind=GroupKind.CONVOLUTION, window=3),
    "ragged_chunk": dict(kind=GroupKind.CHUNK, chunk=10),
    "many_sinks": dict(kind=GroupKind.SINKS_WINDOW, window=3, sinks=10),
    "latent": dict(kind=GroupKind.LATENT),
    "compressed2": dict(kind=GroupKind.COMPRESSED, ratio=2),
    "compressed16": dict(kind=GroupKind.COMPRESSED, ratio=16),
    "indexer8": dict(kind=GroupKind.INDEXER, ratio=8),
    "state8": dict(kind=GroupKind.COMPRESSOR_STATE, ratio=8, overlap=1),
    "snapshot": dict(kind=GroupKind.STATE, window=2),
    "state16": dict(kind=GroupKind.COMPRESSOR_STATE, ratio=16),
}
MIXES = (
    ("full",), ("window",), ("full", "window"), ("full", "sinks_window"), ("full", "chunk"), ("full", "convolution"),
    ("full", "window", "ragged_chunk"), ("sinks_window", "window1"), ("full", "snapshot"),
    ("full", "window", "snapshot"),
)  # fmt: skip
ENTRY_MIXES = (  # with blocks of several units
    ("latent", "compressed16", "window"),
    ("window", "indexer8", "state8"),
    ("many_sinks", "compressed2", "indexer8"),
    ("window", "compressed16", "state16", "indexer8", "state8"),
)


def spec(name: str, *, block_size: int = BLOCK, layers: tuple[int, ...] = (0,)) -> GroupSpec:
    rule = SPECS[name]
    if rule["kind"] in (GroupKind.COMPRESSED, GroupKind.INDEXER):
        block_size = max(block_size, rule["ratio"])
    return GroupSpec(name=name, layers=layers, block_size=block_size, **rule)


def layout(mix: Sequence[str], *, num_pages: int, block_size: int = BLOCK) -> ArenaLayout:
    """Strides differ by group and do not divide the page; each group has two layers, so that repairs reach back further."""
    strides = (1024, 768, 1280, 512, 896)
    groups = tuple(
        GroupLayout(
            spec=spec(name, block_size=block_size, layers=(index, len(mix) + index)),
            block_bytes=stride - 10,
            stride_bytes=stride,
            layers=(),
        )
        for index, (name, stride) in enumerate(zip(mix, strides, strict=False))
    )
    return ArenaLayout(page_bytes=4096, num_pages=num_pages, groups=groups)


@cached
def live_blocks(group: GroupSpec, n: int) -> frozenset[int]:
    """Logical blocks that have a token of `live(n)`."""
    return frozenset(token // group.block_size for begin, end in group.live(n) for token in range(begin, end))


def has_blocks(
    group: GroupSpec,
    found: Container[bytes],
    digests: Sequence[bytes],
    end: int,
    *,
    unit: int,
    pinned_only: bool = False,
) -> bool:
    """Whether the blocks of `live(end)` are found, each under the digest of its last hash block."""
    units_per_block = group.block_size // unit
    blocks = live_blocks(group, end)
    if pinned_only:
        blocks = frozenset(block for block in blocks if block < group.num_sink_blocks)
    return all(digests[(block + 1) * units_per_block - 1] in found for block in blocks)


def cheapest_hit(
    specs: Sequence[GroupSpec],
    found: Sequence[Container[bytes]],
    digests: Sequence[bytes],
    limit: int,
    *,
    unit: int,
    window_repair: bool,
) -> tuple[int, int]:
    """(num_hash_blocks, start) that leaves least to compute, by trying every boundary; of equals the largest boundary."""
    pairs = list(zip(specs, found, strict=True))
    repairable = window_repair and any(group.keeps_everything for group in specs)
    repairable &= not any(group.is_state for group in specs)  # a state depends on all tokens
    choices = []
    for units in range(min(limit, len(digests)) + 1):
        n = units * unit
        start = repair_start(specs, n) // unit * unit if repairable else 0
        if all(has_blocks(group, hashes, digests, n, unit=unit) for group, hashes in pairs):
            choices.append((n, units))
        elif start and all(
            has_blocks(group, hashes, digests, n, unit=unit, pinned_only=not group.keeps_everything)
            for group, hashes in pairs
        ):
            choices.append((start, units))
    start, units = max(choices)
    return units, start


class Mirror:
    """A router's mirror of the index, from updates alone. Only what is there may be removed, and only what is not may be added.

    `takes_joined`: updates may be joined of several, so that changes which cancel out are missing.
    """

    def __init__(self, num_groups: int, *, num_tiers: int = 3, takes_joined: bool = False) -> None:
        self.takes_joined = takes_joined
        self.tiers: list[list[set[bytes]]] = [[set() for _ in range(num_groups)] for _ in range(num_tiers)]
        self.rates: LoadRates | None = None
        self.version = 0

    @property
    def groups(self) -> list[set[bytes]]:
        return self.tiers[0]

    @property
    def host_groups(self) -> list[set[bytes]]:
        return self.tiers[1]

    def apply(self, update: KvUpdate | None) -> None:
        if update is None:
            return
        assert update.whole or update.after == self.version
        if self.takes_joined:  # net effects alone
            changed = [(run.tier, run.group, digest) for run in update.runs for digest in run.digests]
            assert update.whole or len(set(changed)) == len(changed)
        if update.whole:
            self.tiers = [[set() for _ in groups] for groups in self.tiers]
        for run in update.runs:
            groups = self.tiers[run.tier]
            digests = set(run.digests)
            assert len(digests) == len(run.digests)
            if run.action == "added":
                assert not digests & groups[run.group]
                groups[run.group] |= digests
            else:
                assert digests <= groups[run.group]
                groups[run.group] -= digests
        num_changes = sum(len(run.digests) for run in update.runs)
        is_joined = update.whole or update.rates or self.takes_joined
        assert is_joined or num_changes == update.version - update.after
        self.rates = update.rates or self.rates
        self.version = update.version


def check_sequence(sequence: SequenceBlocks) -> None:
    """Check that the fields do not contradict each other."""
    state, load, is_under_way = sequence.state, sequence.load, sequence.repair.is_under_way
    held_in_host = (BlocksState.AWAITS_LOAD, BlocksState.LOADING, BlocksState.SWAPPED)
    has_holes = any(HOLE in (*table.sink_blocks, *table.run, *table.aside.values()) for table in sequence.tables)
    assert bool(load.host_blocks) == (state in held_in_host)
    assert bool(load.ticket) == (state is BlocksState.LOADING)
    assert not has_holes or state in (BlocksState.AWAITS_LOAD, BlocksState.SWAPPED)
    assert sequence.base_node is None or state not in (BlocksState.SWAPPED, BlocksState.RELEASED)
    assert sequence.repair.start <= sequence.repair.end
    assert not (is_under_way and state is BlocksState.SWAPPED)
    assert not (sequence.is_private and sequence.num_published)
    assert sequence.planned_checkpoints == sorted(sequence.planned_checkpoints, key=lambda planned: planned[0])


def check_cache(cache: KvCache, sequences: Iterable[SequenceBlocks]) -> None:
    """Check the counts of every pool, that each block is in exactly one state, and that sequences have their live blocks."""
    sequences = list(sequences)
    for sequence in sequences:
        check_sequence(sequence)
    holds = held_digests(cache)
    check_tree(cache, holds[DEVICE])
    check_host(cache, sequences, holds[HOST])
    assert cache.enable_prefix_caching or not any(cache.index.groups)
    for group, pool in enumerate(cache.pools):
        tables = [sequence.tables[group] for sequence in sequences]
        references = Counter(
            block
            for table in tables
            for block in (*table.sink_blocks, *table.run, *table.aside.values())
            if block != HOLE
        )
        references.update(exported(cache, DEVICE, group))
        references.update(block for of_group, block in cache.tiers.imports.on_device() if of_group == group)
        assert {b: n for b, n in enumerate(pool.refs) if n} == dict(references)
        pinned = [block for block, count in enumerate(pool.pins) if count and not pool.refs[block]]
        cached = [*pinned, *pool.evictable]
        pages = {
            page: cache.arena.blocks(page, group) for page, owner in enumerate(cache.arena.owner) if owner == group
        }
        ids = [block for blocks in pages.values() for block in blocks]
        free = {block for block in ids if pool.is_free(block)}
        assert sorted([*references, *cached, *free]) == ids  # each block is in exactly one state
        assert (pool.num_active, pool.num_pinned, pool.num_free) == (len(references), len(pinned), len(free))
        assert pool.num_leased_blocks == len(ids)
        active_in = Counter(cache.arena.page_of(group, block) for block in references)
        pinned_in = Counter(cache.arena.page_of(group, block) for block in pinned)
        evictable_in = Counter(cache.arena.page_of(group, block) for block in pool.evictable)
        assert pool.num_active_in == {page: active_in[page] for page in pages}
        assert pool.num_pinned_in == {page: pinned_in[page] for page in pages}
        assert pool.num_evictable_in == {page: evictable_in[page] for page in pages}
        assert set(pool.idle_pages) == pages.keys() - active_in.keys()
        assert set(pool.evictable_pages) == pages.keys() - active_in.keys() - pinned_in.keys()
        assert set(pool.busy_evictable_pages) == set(evictable_in) & set(active_in)
        assert pool.slack == sum(len(pages[page]) for page in active_in) - len(references)
        assert not any(free.issuperset(blocks) for blocks in pages.values())
        assert {digest: b for b, (digest, _) in pool.published.items()} == cache.index.groups[group]
        assert set(cached) <= set(pool.published)
        for sequence, table in zip(sequences, tables, strict=True):
            held = [block for block in (*table.sink_blocks, *table.run, *table.aside.values()) if block != HOLE]
            assert len(set(held)) == len(held)
            retention = sequence.retentions[group]
            if isinstance(retention, BoundedRetention):
                assert len(table.sink_blocks) + len(table.run) <= retention.max_blocks
            elif isinstance(table, StateTable):
                assert all(end >= sequence.processed for end in table.ends)  # snapshots are left behind at once
                assert sequence.state is not BlocksState.READY or len(table.live(sequence.processed)) == bool(
                    sequence.processed
                )
            elif sequence.processed >= sequence.repair.end and sequence.state is BlocksState.READY:
                live = live_blocks(retention.spec, sequence.processed)
                assert all(table.at(logical) is not None for logical in live)
                assert not table.run or table.run_logicals[0] >= retention.first_live_block(sequence.processed)
    check_arena(cache.arena)


def check_arena(arena: Arena) -> None:
    """The runs of free pages are the pages that no group leases, each as long as possible."""
    free = [page for page, owner in enumerate(arena.owner) if owner == FREE]
    runs = [range(start, arena._run_end[start]) for start in arena._run_starts]
    assert [page for run in runs for page in run] == free
    assert all(run.stop < after.start for run, after in pairwise(runs))
    assert arena.num_free == len(free)


def check_host(cache: KvCache, sequences: Sequence[SequenceBlocks], holds: Sequence[Counter[bytes]]) -> None:
    """Each block of the host tier is needed by what says so, is a leftover that can be hit, or is free."""
    host = cache.tiers.host
    for group, pool in enumerate(host.pools):
        found = cache.index.tiers[HOST][group]
        needs = Counter({found[digest]: count for digest, count in holds[group].items()})
        needs.update(
            block for sequence in sequences if sequence.load.host_blocks for block in sequence.load.host_blocks[group]
        )
        opened = cache.tiers.imports.opened
        needs.update(one.block for each in opened if each.tier == HOST for one in each.blocks if one.group == group)
        needs.update(block for each in opened if each.cached[HOST] for block in each.cached[HOST][group])
        needs.update(exported(cache, HOST, group))
        assert {b: n for b, n in enumerate(pool.refs) if n} == dict(needs)
        assert not any(pool.pins)
        pages = [page for page, owner in enumerate(host.arena.owner) if owner == group]
        ids = [block for page in pages for block in host.arena.blocks(page, group)]
        free = [block for block in ids if pool.is_free(block)]
        assert sorted([*needs, *pool.evictable, *free]) == ids
        assert {digest: b for b, (digest, _) in pool.published.items()} == found
        assert set(pool.evictable) <= set(pool.published)
        on_device = cache.index.tiers[DEVICE][group]
        # In both tiers lies only what nodes of both need, or what a load has not brought yet.
        assert not [digest for digest in found if digest in on_device and not pool.refs[found[digest]]]
    check_arena(host.arena)


def exported(cache: KvCache, tier: int, group: int) -> list[int]:
    """A tier's blocks of a group that exports need, once for each export."""
    lent = [one for opened in cache.tiers.exports.opened for one in opened.blocks]
    return [one.block for one in lent if (one.tier, one.group) == (tier, group)]


def held_digests(cache: KvCache) -> list[list[Counter[bytes]]]:
    """By tier and group, how many nodes of the prefix tree need each digest's block."""
    tree = cache.checkpoints.tree
    holds: list[list[Counter[bytes]]] = [[Counter() for _ in cache.pools] for _ in range(2)]
    for node in tree.nodes():
        assert node.parent is not None
        assert (node.parent.tier, node.windows_tier) <= (node.tier, HOST)  # the device's segments come first
        assert node.tier <= node.windows_tier or not node.windows
        for group, step in node.retentions.full_groups:
            begin = node.parent.boundary
            ends = [at for at in range(len(node.segment)) if (begin + at + 1) % step == 0]
            holds[node.tier][group].update([node.segment[at] for at in ends])
        for group, num_sink_blocks in node.retentions.sliding_groups:
            holds[node.tier][group].update(node.segment[: max(0, num_sink_blocks - node.parent.boundary)])
        for group, digests in node.window_blocks():
            holds[node.windows_tier][group].update(digests)
    return holds


def check_tree(cache: KvCache, holds: Sequence[Counter[bytes]]) -> None:
    """Pins are what the tree's nodes say, chains are whole, checkpoints complete."""
    checkpoints, tree = cache.checkpoints, cache.checkpoints.tree
    owned: dict[bytes, object] = {}
    nodes = list(tree.nodes())
    chains: dict[int, list[bytes]] = {id(tree.root): []}
    for tier, candidates in enumerate(checkpoints.eviction.candidates):
        somewhere = [node for node in nodes if tier in (node.tier, node.windows_tier if node.windows else node.tier)]
        assert {id(node) for node in candidates.all()} == {id(node) for node in somewhere}
    for node in nodes:
        assert node.parent is not None
        assert node in node.parent.children
        assert node.boundary == node.parent.boundary + len(node.segment)
        assert node.segment[-1] == node.digest
        for digest in node.segment:
            assert digest not in owned
            owned[digest] = node
        assert node.num_held_children == sum(child.is_held for child in node.children)
        chain = chains[id(node)] = [*chains[id(node.parent)], *node.segment]
        assert node.windows is None or len(node.windows) == len(node.retentions.sliding_groups)
        for group, digests in node.window_blocks():
            live = live_blocks(node.retentions.specs[group], node.boundary * cache.block_size)
            pinned = node.retentions.specs[group].num_sink_blocks
            assert {chain[block] for block in live if block >= pinned} <= set(digests) <= set(chain[pinned:])
            assert len(set(digests)) == len(digests)
    assert owned == tree.owner
    for group, counts in enumerate(holds):
        found = cache.index.groups[group]
        by_block = {found[digest]: count for digest, count in counts.items()}
        assert by_block == {block: count for block, count in enumerate(cache.pools[group].pins) if count}
    locked = [blocks.base_node for blocks in cache.running.values()]
    locked += [opened.locked for opened in cache.tiers.imports.opened]
    locks = Counter(id(node) for node in locked if node is not None and node.parent is not None)
    assert {id(node): node.locks for node in nodes if node.locks} == dict(locks)
    current = Counter(node.kind.value for node in nodes if node.windows is not None)
    assert +Counter(checkpoints.counts.current) == current
