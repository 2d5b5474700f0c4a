"""A cache, sequences that run on it, and ranks that do what it says, with every invariant checked after each operation.

Ranks write, into every block that a step's tables name, which prefix each position was computed from, and look up all that a query
reads. So a block that was freed too early, published with other contents or moved without its contents shows.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.prefix_chains import chain_of
from tests.worker.kvcache.cache_model import BLOCK, Mirror, cheapest_hit, check_cache, layout
from tests.worker.kvcache.rank_model import Content, RankTable, Slab, copy_blocks, prefix_tags
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.hashing import chain_root
from transom_core.kv_cache.prefix_search import PrefixHit, find_hit, hit_limit
from transom_core.kv_cache.tiers import DISK, HOST
from transom_worker.kvcache.blocks.block_copies import BlockCopy
from transom_worker.kvcache.blocks.block_table import StateTable
from transom_worker.kvcache.blocks.sequence_blocks import SequenceBlocks
from transom_worker.kvcache.manager import KvCache
from transom_worker.kvcache.prefix.tree import CheckpointKind
from transom_worker.kvcache.tiers.imports import BlockImport

ROOT = chain_root(BLOCK)
WRONG = b"computed without all that it reads"


@dataclass(eq=False)
class CacheSequence:
    """A sequence: its tokens, how many of them plans cover, and its tables on ranks."""

    token_ids: list[int]
    tags: list[bytes]
    blocks: SequenceBlocks
    tables: list[RankTable]
    scheduled: int
    num_in_flight: int = 0


@dataclass
class Row:
    """A sequence's share of a step: positions `[start, end)` on the tables as they were when it was planned."""

    sequence: CacheSequence
    start: int
    end: int
    tables: list[dict[int, int]]  # by group: logical -> block
    states: list[tuple[int | None, int]]  # by group of snapshots: logical blocks that the row begins with and writes


@dataclass
class Step:
    copies: list[BlockCopy]
    rows: list[Row] = field(default_factory=list)


class CacheDriver:
    def __init__(
        self,
        mix: Sequence[str],
        *,
        num_pages: int,
        host_pages: int = 0,
        has_disk: bool = False,
        caching: bool = True,
        window_repair: bool = True,
    ) -> None:
        self.layout = layout(mix, num_pages=num_pages)
        host_layout = replace(self.layout, num_pages=host_pages) if host_pages else None
        self.specs = [group.spec for group in self.layout.groups]
        self.now_s = 0.0
        self.cache = KvCache(
            self.layout,
            host_layout,
            block_size=BLOCK,
            enable_prefix_caching=caching,
            window_repair=window_repair,
            clock=lambda: self.now_s,
        )
        self.disk: dict[tuple[int, bytes], dict[int, Content]] = {}  # it keeps everything
        self.imports: dict[int, BlockImport] = {}  # by ticket; those that have not ended
        self.num_imported = 0  # blocks
        self.num_received = [0, 0]  # blocks by tier
        self.slab = Slab(self.layout)
        self.slabs = [self.slab, Slab(host_layout or self.layout)]  # by tier
        self.loads: deque[list[BlockCopy]] = deque()  # that ranks were told of, in order
        self.num_loaded = 0  # blocks
        self.mirror = Mirror(len(self.specs))
        self.mirror.apply(self.cache.changes.whole())
        if has_disk:
            self.cache.tiers.open_disk(self.layout)
            if self.cache.changes.rates is not None:  # reading is worth its time
                self.cache.changes.set_rates(self.cache.changes.rates._replace(token_ns=10**12))
        self.sequences: list[CacheSequence] = []
        self.steps: deque[Step] = deque()
        self.truth: dict[tuple[int, bytes], list[tuple[int, bytes]]] = {}  # (group, digest) -> a block's contents
        self.num_prompt_tokens = 0
        self.num_repairs = 0
        self.num_refused = 0

    @property
    def num_spilled(self) -> int:
        """Blocks that went to the host tier."""
        return sum(self.cache.tiers.moves.num_spilled)

    # Operations

    def begin(
        self, token_ids: list[int], boundaries: Sequence[tuple[int, CheckpointKind]] = (), *, reads_cache: bool = True
    ) -> bool:
        """Search, begin, and admit if there is room for a first token."""
        chain = chain_of(token_ids, BLOCK)
        tags = prefix_tags(token_ids)
        self._remember(chain, tags)
        hit = self._find(chain, len(token_ids)) if reads_cache and self.cache.enable_prefix_caching else None
        blocks = self.cache.begin(chain, ROOT, hit=hit)
        tables = [RankTable(spec.num_sink_blocks) for spec in self.specs]
        sequence = CacheSequence(token_ids, tags, blocks, tables, scheduled=blocks.processed)
        self.sequences.append(sequence)
        if not (self.cache.start_load(blocks) if blocks.load.host_blocks else self._extend(sequence, 1)):
            self.sequences.remove(sequence)
            self.cache.release(blocks, kind=None)
            return False
        self.num_prompt_tokens += len(token_ids)
        self.cache.outcomes.count(hit, chain, num_tokens=len(token_ids), num_prompt_tokens=len(token_ids))
        after_hit = hit.num_hash_blocks if hit else 0
        self.cache.plan_checkpoints(blocks, [(units, kind) for units, kind in boundaries if units > after_hit])
        self.num_repairs += blocks.repair.is_needed
        self._check()
        return True

    def plan_fork_checkpoint(self, index: int, units_ahead: int) -> None:
        """A checkpoint is planned at a boundary that the sequence has not processed, where a waiting one's chain parts."""
        if self.sequences:
            sequence = self.sequences[index % len(self.sequences)]
            units = max(sequence.blocks.processed // BLOCK, sequence.blocks.num_published - 1) + 1 + units_ahead
            if units <= len(sequence.token_ids) // BLOCK:
                self.cache.publishing.plan_fork_checkpoint(sequence.blocks, units)

    def plan(self, wanted: Sequence[tuple[int, int]]) -> None:
        """A step over (index of a sequence, tokens): each gets as many tokens as it gets blocks for."""
        rows = []
        for index, count in dict(wanted).items():
            sequence = self.sequences[index % len(self.sequences)]
            count = min(count, len(sequence.token_ids) - sequence.scheduled)
            if self.cache.state_group is not None:  # a chunk ends where a checkpoint is due
                ends = [units * BLOCK - sequence.scheduled for units, _ in sequence.blocks.planned_checkpoints]
                count = min([count, *(end for end in ends if end > 0)])
            is_free = sequence not in [row[0] for row in rows] and not sequence.blocks.load.ticket
            if count and is_free and self._extend(sequence, count):
                self._tell_deltas(sequence)
                rows.append((sequence, count))
        step = Step(self.cache.copies.take())
        for sequence, count in rows:
            self._tell_moves(sequence)
            tables = [dict(table.blocks) for table in sequence.tables]
            start = sequence.scheduled
            held = [table for table in sequence.blocks.tables if isinstance(table, StateTable)]
            states = [(table.read_by(start), table.written_by(start)) for table in held]
            step.rows.append(Row(sequence, start, start + count, tables, states))
            sequence.scheduled += count
            sequence.num_in_flight += 1
        self.steps.append(step)
        self._check()

    def receive(self) -> None:
        """Ranks execute the oldest step, and its result arrives."""
        if not self.steps:
            return
        step = self.steps.popleft()
        for copy in step.copies:
            if copy.target_tier == DISK:
                self._store(copy)
            elif not copy.ticket:
                copy_blocks(self.slabs, [copy])
            elif self.loads and self.loads[-1][0].ticket == copy.ticket:
                self.loads[-1].append(copy)
            else:
                self.loads.append([copy])
        for row in step.rows:
            self._compute(row)
        for row in step.rows:
            row.sequence.num_in_flight -= 1
            self.cache.advance(row.sequence.blocks, row.sequence.token_ids, row.end)
        self._check()

    def load(self) -> None:
        """The ranks have done the oldest load that they know of. They make its copies at the last moment."""
        if self.loads:
            copies = self.loads.popleft()
            if is_read := copies[0].source_tier == DISK:
                for copy in copies:
                    self.slabs[HOST].put(copy.group, copy.target, dict(self.disk[copy.group, copy.digest]))
            else:
                copy_blocks(self.slabs, copies)
                self.num_loaded += len(copies)
            for ticket in self.cache.copies.ended([copies[0].ticket], [0.0], [])[0]:
                if is_read:
                    self.cache.tiers.imports.publish(self.imports[ticket])
                else:
                    self.cache.finish_load(ticket)
            self._check()

    def bring(self, token_ids: list[int]) -> None:
        """Import what the disk has of a prompt beyond the memory."""
        chain = chain_of(token_ids, BLOCK)
        hit = self.cache.find(chain, len(token_ids), with_disk=True)
        opened = self.cache.tiers.imports.begin(chain, hit)
        self._check()
        if opened is not None:
            self.imports[self.cache.tiers.imports.fetch(opened)] = opened
            self.num_imported += len(opened.blocks)
            while not opened.is_published:
                self._make_loads()
            for one in opened.blocks:  # found, if not because a sequence has published it meanwhile
                assert any(one.digest in tier[one.group] for tier in self.cache.index.tiers)

    def receive_blocks(self, token_ids: list[int]) -> None:
        """Import from another worker, which has all that was ever computed here. Without a prefix cache nothing is imported."""
        chain = chain_of(token_ids, BLOCK)
        there = [{digest for of_group, digest in self.truth if of_group == group} for group in range(len(self.specs))]
        hit = find_hit(self.cache.retentions, there, chain, hit_limit(len(token_ids), BLOCK), window_repair=False)
        opened = (
            self.cache.tiers.imports.begin(chain, hit, on_device=True)
            if hit.start and self.cache.enable_prefix_caching
            else None
        )
        self.plan([])  # with the copies that the import has queued
        while self.steps:
            self.receive()
        if opened is not None:
            for one in opened.blocks:
                size, contents = self.specs[one.group].block_size, self.truth[one.group, one.digest]
                at = [0] if self.specs[one.group].is_state else [position % size for position, _ in contents]
                self.slabs[opened.tier].put(one.group, one.block, dict(zip(at, contents, strict=True)))
            self.cache.tiers.imports.publish(opened)
            self.imports[-id(opened)] = opened
            self.num_received[opened.tier] += len(opened.blocks)
        self._check()

    def end_imports(self) -> None:
        """What was imported may be evicted from now on."""
        while self.imports:
            self.cache.tiers.imports.end(self.imports.popitem()[1])
            self._check()

    def load_all(self) -> None:
        """All loads are done, those that the ranks were not told of yet as well."""
        while any(sequence.blocks.load.ticket for sequence in self.sequences):
            self._make_loads()

    def _make_loads(self) -> None:
        self.plan([])
        while self.steps:
            self.receive()
        while self.loads:
            self.load()

    def complete(self, index: int, kind: CheckpointKind | None, *, chunk: int) -> None:
        """Run a sequence to its end, as far as there is memory."""
        if self.sequences:
            self.load_all()
            sequence = self.sequences[index % len(self.sequences)]
            while sequence.scheduled < len(sequence.token_ids):
                before = sequence.scheduled
                self.plan([(self.sequences.index(sequence), chunk)])
                if sequence.scheduled == before:
                    break
                self.receive()
            while sequence.num_in_flight:
                self.receive()
            self.release(self._idle().index(sequence), kind)

    def release(self, index: int, kind: CheckpointKind | None) -> CacheSequence | None:
        """End a sequence that no step in flight computes."""
        idle = self._idle()
        if not idle:
            return None
        sequence = idle[index % len(idle)]
        self.sequences.remove(sequence)
        self.cache.release(sequence.blocks, kind=kind)
        self._check()
        return sequence

    def preempt(self, index: int) -> None:
        """Release, and begin again with what is cached."""
        sequence = self.release(index, CheckpointKind.PREEMPTED)
        if sequence is not None:
            self.begin(sequence.token_ids)

    def evict_all(self) -> None:
        self.cache.evict_all()
        assert not any(found for groups in self.cache.index.tiers for found in groups)
        assert all(group.cached_blocks == 0 for group in self.cache.stats().groups)
        self._check()

    def finish(self) -> None:
        """End every sequence; no reference may be left."""
        while self.steps:
            self.receive()
        self.load_all()
        while self.sequences:
            self.release(0, CheckpointKind.GENERATION)
        self.end_imports()
        stats = self.cache.stats()
        assert all(group.active_blocks == 0 for group in stats.groups)
        self.evict_all()
        stats = self.cache.stats()
        assert stats.free_pages == stats.num_pages
        assert not any(stats.checkpoints.current.values())
        assert stats.fragmentation == 0.0
        assert self.cache.tiers.host.arena.num_free == self.cache.tiers.host.arena.num_pages

    # The model

    def _find(self, chain: list[bytes], num_tokens: int) -> PrefixHit:
        hit = self.cache.find(chain, num_tokens)
        limit, repair = hit_limit(num_tokens, BLOCK), self.cache.window_repair
        found, in_host = self.mirror.groups, self.mirror.host_groups
        if hit.num_loaded:
            found = [on_device | others for on_device, others in zip(found, in_host, strict=True)]
        expected = cheapest_hit(self.specs, found, chain, limit, unit=BLOCK, window_repair=repair)
        assert (hit.num_hash_blocks, hit.start) == expected
        how: dict[str, Any] = {"window_repair": repair, "host": in_host, "rates": self.mirror.rates}
        assert hit == find_hit(self.cache.retentions, self.mirror.groups, chain, limit, **how)
        return hit

    def _extend(self, sequence: CacheSequence, count: int) -> bool:
        end = sequence.scheduled + count
        needs = [
            table.num_missing(end, spec.block_size)
            for spec, table in zip(self.specs, sequence.blocks.tables, strict=True)
        ]
        before = [(list(table.sink_blocks), list(table.run)) for table in sequence.blocks.tables]
        held = Counter(self.cache.tiers.imports.on_device())  # two imports may hold one block
        kept = [
            sum(of_group == group and pool.refs[block] == times for (of_group, block), times in held.items())
            for group, pool in enumerate(self.cache.pools)
        ]
        packed = sum(
            -(-(pool.num_active - num_kept + need) // per_page)  # what imports keep is given up
            for pool, num_kept, need, per_page in zip(
                self.cache.pools, kept, needs, self.cache.arena.blocks_per_page, strict=True
            )
        )
        done = self.cache.extend(sequence.blocks, end)
        # Neither refused while moving blocks would help, nor out of thin air. What a load writes cannot be moved.
        is_loading = any(other.blocks.load.ticket for other in self.sequences)
        assert done == (packed <= self.layout.num_pages) or (is_loading and not done)
        if not done:
            self.num_refused += 1
            assert before == [(table.sink_blocks, table.run) for table in sequence.blocks.tables]
        return done

    def _tell_deltas(self, sequence: CacheSequence) -> None:
        for group, delta in sequence.blocks.take_deltas():
            sequence.tables[group].apply(delta.dropped, delta.appended, delta.first_block)

    def _tell_moves(self, sequence: CacheSequence) -> None:
        for theirs, ours in zip(sequence.tables, sequence.blocks.tables, strict=True):
            for logical, block in ours.take_moves():
                theirs.replace(logical, block)
            assert theirs.blocks == dict(enumerate(ours.sink_blocks)) | dict(
                zip(ours.run_logicals, ours.run, strict=True)
            )

    def _compute(self, row: Row) -> None:
        sequence, until = row.sequence, row.sequence.blocks.repair.end
        states = iter(row.states)
        for group, (spec, table) in enumerate(zip(self.specs, row.tables, strict=True)):
            if spec.is_state:
                read, written = next(states)
                before = None if read is None else self.slab.read(group, 0, table[read])
                assert before == ((row.start, sequence.tags[row.start - 1]) if row.start else None)
                self.slab.write(group, 0, table[written], (row.end, sequence.tags[row.end - 1]))
        for query in range(row.start, row.end):
            content = (query, sequence.tags[query])
            for group, (spec, table) in enumerate(zip(self.specs, row.tables, strict=True)):
                if spec.is_state:
                    continue
                if query >= until:
                    self._check_reads(group, spec, table, sequence, query)
                if spec.kind in (GroupKind.COMPRESSED, GroupKind.INDEXER):
                    if query >= until and (query + 1) % spec.ratio == 0:
                        for position in range(query + 1 - spec.ratio, query + 1):
                            self._write(group, spec, table, (position, sequence.tags[position]))
                elif query >= until or not (spec.keeps_everything or query // spec.block_size < spec.num_sink_blocks):
                    right = query >= min(until, self.cache.retentions[group].first_live_block(until) * spec.block_size)
                    self._write(group, spec, table, content if right else (query, WRONG))

    def _check_reads(
        self, group: int, spec: GroupSpec, table: dict[int, int], sequence: CacheSequence, query: int
    ) -> None:
        for begin, end in spec.live(query):
            for position in range(begin, end):
                found = self.slab.read(group, position, table[position // spec.block_size])
                assert found == (position, sequence.tags[position])

    def _write(self, group: int, spec: GroupSpec, table: dict[int, int], content: tuple[int, bytes]) -> None:
        position = content[0]
        self.slab.write(group, position, table[position // spec.block_size], content)

    def _store(self, copy: BlockCopy) -> None:
        contents = self.slabs[copy.source_tier].contents(copy.group, copy.source)
        assert [content for _, content in sorted(contents.items())] == self.truth[copy.group, copy.digest]
        self.disk[copy.group, copy.digest] = contents
        if self.cache.tiers.disk.is_open:
            self.cache.tiers.disk.add(copy.group, [copy.digest])

    def _remember(self, chain: list[bytes], tags: list[bytes]) -> None:
        for group, spec in enumerate(self.specs):
            step = spec.block_size // BLOCK
            for block in range(len(chain) // step):
                positions = range(block * spec.block_size, (block + 1) * spec.block_size)
                contents = [(p, tags[p]) for p in positions]
                if spec.is_state:
                    contents = [(positions.stop, tags[positions[-1]])]
                self.truth[group, chain[(block + 1) * step - 1]] = contents

    def _idle(self) -> list[CacheSequence]:
        return [one for one in self.sequences if not one.num_in_flight and not one.blocks.load.ticket]

    def _check(self) -> None:
        check_cache(self.cache, [sequence.blocks for sequence in self.sequences])
        self.mirror.apply(self.cache.changes.take())
        assert self.mirror.tiers[: len(self.cache.index.tiers)] == [
            [set(group) for group in groups] for groups in self.cache.index.tiers
        ]
        assert self.mirror.tiers[DISK] == [set(group) for group in self.cache.tiers.disk.groups]
        stats = self.cache.stats()
        assert sum(stats.outcome_tokens.values()) == self.num_prompt_tokens
        for group in stats.groups:
            assert sum(group.residency.counts) == sum(group.evicted_blocks.values())
        if not self.cache.copies.waiting and not self.steps:  # else contents are still on their way
            for slab, groups in zip(self.slabs, self.cache.index.tiers, strict=False):
                for index, found in enumerate(groups):
                    for digest, block in found.items():
                        assert slab.block(index, block) == self.truth[index, digest]
