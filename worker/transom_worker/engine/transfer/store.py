"""`TransferStore`: gives KV transfer access to the engine's KV cache: block ids from the scheduler's cache, bytes from the ranks.

The source lends blocks (*export*): it calls `open_export`, `read_export` for each piece, then `close_export`. The target takes
blocks for them and writes their bytes (*import*): it calls `query`, `has`, `begin_import`, brings the blocks, then calls
`publish_import` or, if a block is missing, `drop_import`. It brings them by `convert` and `write_import` for each piece, or by
`begin_read` (`wires`).

All methods but `convert`, `handed_over` and `own_query` run on the engine's thread, between two steps, and must be short. The
callers choose the ids of exports and imports, so that they can end one even if they never learned whether it began: ending an
unknown id does nothing.
"""

import contextlib
import os
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

from transom_core.contract import KvPolicy, Request, WindowPolicy
from transom_core.contract.kv_transfer import PIECE_BYTES, BlockRange, PrefixOffer, PrefixQuery, RankMemory
from transom_core.contract.prefix_peers import Bytes
from transom_core.errors import StepFailed
from transom_core.kv_cache.hashing import extend_chain
from transom_core.kv_cache.kv_shares import KvShares
from transom_core.kv_cache.prefix_search import PrefixHit, hit_limit
from transom_core.kv_cache.tiers import DEVICE, HOST
from transom_worker.execution.executor import Executor, ReadEnd, RemoteBlock, RemoteRead
from transom_worker.kvcache.tiers.block_format import block_digest, convert_blocks
from transom_worker.kvcache.tiers.exports import BlockExport, ExportedBlock
from transom_worker.kvcache.tiers.imports import BlockImport, KeptImports
from transom_worker.scheduling.scheduler import Scheduler

T = TypeVar("T")

RANKS_LOST = "the ranks that read have ended"  # the end of a read that is no fault of its source


class OnEngine(Protocol):
    """Runs functions on the engine's thread, between two steps, in the order of the calls."""

    def __call__(self, function: Callable[[], T]) -> Awaitable[T]:
        """Queue the function, and return an awaitable of its result, which the caller may ignore. A caller that is cancelled does
        not learn whether the function ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPlan:
    """The blocks of an offer that are missing here; blocks are allocated for them.

    `pieces` are the block ranges to read, each with its bytes at the source. `num_tokens` is the length of the prefix that is a hit
    when all pieces are written. `full_length_bytes` is explained in `transfer_report.FetchReport`.
    """

    pieces: tuple[tuple[BlockRange, int], ...]
    num_tokens: int
    num_blocks: int
    full_length_bytes: int
    on_device: bool = False


class TransferStore:
    """The KV cache of one worker, as KV transfer uses it. `shares` says what the blocks of every rank of this worker contain;
    `kept` keeps complete imports."""

    def __init__(self, scheduler: Scheduler, executor: Executor, shares: KvShares, kept: KeptImports) -> None:
        # The memories of this worker's ranks, if other workers' ranks can read them and these ranks theirs. Each start of the ranks
        # changes them.
        self.memories: tuple[RankMemory, ...] = ()
        self._scheduler, self._cache, self._executor = scheduler, scheduler.cache, executor
        self._shares, self._kept = shares, kept
        self._exports: dict[str, BlockExport] = {}
        self._imports: dict[str, BlockImport] = {}
        # Import id -> for each rank that reads its blocks, None while bytes may still come; and what is called when all are done.
        self._reads: dict[str, tuple[list[ReadEnd | None], Callable[[str, float], None]]] = {}
        executor.on_read_end(self._read_ended)

    # Source

    def open_export(
        self, export_id: str, query: PrefixQuery, *, more_than: int = 0, num_held: int = 0
    ) -> PrefixOffer | None:
        """Reference the blocks of the query's longest boundary that is a hit here, and offer them; None if that is not `more_than`
        so many hash blocks. Of groups that keep every token, the blocks of the first `num_held` are left out.

        Raises:
            ValueError: the query is of another model, or of a cache with other groups.
        """
        shape = self._cache.shape
        if query.identity != shape.identity:
            raise ValueError(f"its model is {shape.identity}")
        if query.groups != shape.groups or query.block_size != shape.block_size:
            raise ValueError(f"it has the groups {[group.name for group in query.groups]}")
        retentions = self._scheduler.policy_retentions.of(query.kv_policy)
        exports, hit, num_blocks = self._cache.tiers.exports, self._find(query), len(query.chain)
        opened = None
        if hit.start and hit.num_hash_blocks > more_than:
            opened = exports.begin(query.chain, hit, retentions, num_held=num_held)
        if query.is_probe:
            opened, end = self._lend_any(num_blocks), num_blocks * shape.block_size
            hit = PrefixHit(num_hash_blocks=num_blocks, start=end, full_groups_reach=num_blocks, limit=num_blocks)
        if opened is None:
            return None
        self._exports[export_id] = opened
        is_whole = hit.start == num_blocks * shape.block_size
        has_windows = not query.is_early or (is_whole and not query.is_probe)
        blocks: list[list[int]] = [[] for _ in shape.groups]
        places: list[list[tuple[int, int]]] = [[] for _ in shape.groups]
        for one in opened.blocks:
            if has_windows or retentions[one.group].keeps_everything:
                blocks[one.group].append(one.logical)
                places[one.group].append((one.tier, one.block))
        is_readable = query.shares is not None and bool(self.memories)
        digests: list[dict[int, tuple[bytes, ...]]] = [{} for _ in shape.groups]
        for group, logicals in enumerate(blocks):
            if is_readable and logicals:
                # The last block, since the target may have others already, and one at random.
                sample = logicals if query.verifies_all else {random.choice(logicals), logicals[-1]}
                digests[group] = {one: self._digests(export_id, query, BlockRange(group, (one,))) for one in sample}
        return PrefixOffer(
            export_id=export_id,
            num_hash_blocks=hit.num_hash_blocks,
            start=hit.start,
            blocks=tuple(map(tuple, blocks)),
            shares=self._shares,
            memories=self.memories if is_readable else (),
            places=tuple(map(tuple, places)) if is_readable else (),
            digests=tuple(digests),
            has_windows=has_windows,
            num_held=num_held,
        )

    def open_early(
        self, export_id: str, request_id: str, query: PrefixQuery, *, more_than: int, num_held: int
    ) -> PrefixOffer | None:
        """Do `open_export` for a request's prompt."""
        sequence = self._scheduler.by_request.get(request_id)
        if sequence is not None and (sequence.blocks is None or sequence.blocks.num_published <= more_than):
            return None  # what a search would find, too
        return self.open_export(export_id, query, more_than=more_than, num_held=num_held)

    def read_export(self, export_id: str, blocks: BlockRange) -> Sequence[bytes]:
        """Return the bytes of blocks of an export, for each rank. Raises KeyError: the export has ended, or the cache was
        emptied."""
        opened = self._exports[export_id]
        if opened.is_void:
            raise KeyError(export_id)
        places = {one.logical: (one.tier, one.block) for one in opened.blocks if one.group == blocks.group}
        parts: list[list[bytes]] = [[] for _ in range(self._shares.num_ranks)]
        for tier, ids in _runs_of_tiers([places[logical] for logical in blocks.blocks]):
            for part, data in zip(parts, self._executor.read_blocks(tier, blocks.group, ids), strict=True):
                part.append(data)
        return [b"".join(part) for part in parts]

    def close_export(self, export_id: str) -> None:
        """Release the references of an export; unknown ids are ignored."""
        if (opened := self._exports.pop(export_id, None)) is not None:
            self._cache.tiers.exports.end(opened)

    def handed_over(self, request: Request) -> PrefixQuery:
        """Return a query for the whole prompt of a request that another worker will continue. Any thread may call this."""
        chain: list[bytes] = []
        block_size = self._cache.block_size
        extend_chain(chain, self._scheduler.root_of(request), request.prompt_token_ids, block_size)
        return self._query(tuple(chain), len(chain) * block_size, request.kv_policy)

    # Target

    def query(self, request_id: str, num_tokens: int) -> PrefixQuery | None:
        """Return the query for the longest prefix of a held request that may be a hit; None if there is nothing to ask for."""
        sequence = self._scheduler.by_request.get(request_id)
        if sequence is None or not sequence.is_held or not sequence.reads_prefix_cache:
            return None
        block_size = self._cache.block_size
        extend_chain(sequence.chain, sequence.root, sequence.token_ids, block_size)
        chain = tuple(sequence.chain[: hit_limit(len(sequence.token_ids), block_size)])
        return self._query(chain, num_tokens, sequence.request.kv_policy) if chain else None

    def own_query(self, query: PrefixQuery) -> PrefixQuery | None:
        """Return a query of the source's as this worker asks it; None if this worker has another model or other groups."""
        own = replace(self._query(query.chain, query.num_tokens, query.kv_policy), is_early=True)
        facts = [(one.identity, one.groups, one.block_size) for one in (own, query)]
        return own if facts[0] == facts[1] else None

    def probe(self, num_bytes: int, *, by_calls: bool) -> PrefixQuery | None:
        """Return a query for any blocks with about `num_bytes` over all ranks, which must not be published; None if no group keeps
        every token. `by_calls`: this worker's ranks do not read the source's memory."""
        retentions = enumerate(self._scheduler.policy_retentions.of(None))
        kept = {group: retention.block_size for group, retention in retentions if retention.keeps_everything}
        unit = max(kept.values(), default=0)  # tokens: whole blocks of each group
        size = sum(
            own[group].block_bytes * unit // tokens for own in self._shares.groups for group, tokens in kept.items()
        )
        if not size:
            return None
        num_tokens = -(-num_bytes // size) * unit
        chain = tuple(os.urandom(16) for _ in range(num_tokens // self._cache.block_size))
        query = replace(self._query(chain, num_tokens, None), is_early=True, is_probe=True)
        return replace(query, shares=None) if by_calls else query

    def has(self, request_id: str, query: PrefixQuery) -> bool:
        """Return whether a search here finds as many tokens as the router expects; if so, keep imports of them for this request,
        too."""
        if self._find(query).start < query.num_tokens:
            return False
        self._kept.join(request_id, query.chain)
        return True

    def begin_import(
        self, import_id: str, query: PrefixQuery, offer: PrefixOffer
    ) -> ImportPlan | Literal["present", "no_space", "not_found"]:
        """Take blocks for the offered blocks that are missing here, on the device if they fit there (`Imports.begin`).

        present: none is missing; no_space: the host tier has no room either; not_found: others are missing, which are not offered.
        """
        self._kept.end_admitted()
        before = self._find(query).start
        hit = PrefixHit(
            num_hash_blocks=offer.num_hash_blocks,
            start=offer.start,
            full_groups_reach=offer.num_hash_blocks,
            limit=len(query.chain),
        )
        retentions = self._scheduler.policy_retentions.of(query.kv_policy)
        imports = self._cache.tiers.imports
        opened = imports.begin(query.chain, hit, retentions, with_windows=offer.has_windows, on_device=True)
        if opened is None:
            lacks_any = imports.lacks_any(query.chain, hit, retentions, with_windows=offer.has_windows)
            return "no_space" if lacks_any else "present"
        offered = [set(logicals) for logicals in offer.blocks]
        if not all(one.logical in offered[one.group] for one in opened.blocks):
            imports.end(opened)
            return "not_found"
        self._imports[import_id] = opened
        missing: list[list[int]] = [[] for _ in query.groups]
        for one in opened.blocks:
            missing[one.group].append(one.logical)
        sizes = [sum(groups[group].block_bytes for groups in offer.shares.groups) for group in range(len(missing))]
        return ImportPlan(
            pieces=tuple(
                piece for group in range(len(missing)) for piece in self._pieces(offer, group, missing[group])
            ),
            num_tokens=max(0, offer.start - before),
            num_blocks=len(opened.blocks),
            on_device=opened.tier == DEVICE,
            full_length_bytes=sum(
                size * (len(some) if retention.keeps_everything else offer.num_hash_blocks)
                for retention, size, some in zip(retentions, sizes, missing, strict=True)
            ),
        )

    def awaits_copies(self, import_id: str) -> bool:
        """Return whether no byte may come into an import's blocks yet. Raises KeyError: the import has ended."""
        return self._cache.tiers.imports.awaits_copies(self._imports[import_id])

    def convert(self, offer: PrefixOffer, blocks: BlockRange, data: Sequence[Bytes]) -> Sequence[Bytes]:
        """Return the bytes for each of this worker's ranks, made from those of the source's ranks. Any thread may call it."""
        return convert_blocks(offer.shares, self._shares, blocks.group, data)

    def write_import(self, import_id: str, blocks: BlockRange, data: Sequence[Bytes]) -> None:
        """Write converted blocks. Raises KeyError: the import has ended, or the cache was emptied."""
        opened = self._imports[import_id]
        if opened.is_void:
            raise KeyError(import_id)
        places = {one.logical: one.block for one in opened.blocks if one.group == blocks.group}
        ids = [places[logical] for logical in blocks.blocks]
        self._executor.write_blocks(opened.tier, blocks.group, ids, [part.tobytes() for part in data])

    def publish_import(self, import_id: str, request_ids: Iterable[str], *, is_awaited: bool = False) -> None:
        """Publish the imported blocks, and keep them until these requests are admitted or have ended, but only for a limited time;
        `is_awaited`: another request will come for them. Raises KeyError: the import has ended."""
        self._kept.publish(self._imports.pop(import_id), request_ids, is_awaited=is_awaited)
        self._reads.pop(import_id, None)

    def end_admitted(self) -> None:
        """End the imports that are kept for no request any more."""
        self._kept.end_admitted()

    def drop_import(self, import_id: str) -> bool:
        """Free the blocks of an import that is not complete, and return True. Return False while ranks may still read into them:
        then the import publishes nothing any more, and the caller must call again."""
        if (opened := self._imports.get(import_id)) is None:
            return True
        with contextlib.suppress(StepFailed):  # the ranks do not run
            self._executor.take_read_ends()
        if import_id in self._reads and None in self._reads[import_id][0]:
            self._cache.tiers.imports.give_up(opened)
            return False
        del self._imports[import_id]
        self._reads.pop(import_id, None)
        self._cache.tiers.imports.end(opened)
        return True

    def begin_read(self, import_id: str, offer: PrefixOffer, on_end: Callable[[str, float], None]) -> None:
        """Let all ranks read an import's blocks out of the memory of the offer's ranks.

        When no byte can come any more, `on_end` is called on any thread, once or more often, with the reason why the blocks are not
        what the source offered, or "" if they are, and the seconds that the slowest rank read.

        Raises:
            KeyError: the import has ended, or the cache was emptied.
        """
        opened = self._imports[import_id]
        if opened.is_void:
            raise KeyError(import_id)
        places = [dict(zip(*pair, strict=True)) for pair in zip(offer.blocks, offer.places, strict=True)]
        blocks = tuple(
            RemoteBlock(one.group, one.logical, *places[one.group][one.logical], opened.tier, one.block)
            for one in opened.blocks
        )
        self._reads[import_id] = [None] * self._shares.num_ranks, on_end
        self._executor.begin_read(
            RemoteRead(
                read_id=import_id, memories=offer.memories, shares=offer.shares, blocks=blocks, digests=offer.digests
            )
        )

    def take_read_ends(self) -> None:
        """Let the ranks say which reads are over. Raises StepFailed: the ranks do not run."""
        self._executor.take_read_ends()

    def end_reads(self) -> None:
        """Note that the ranks have ended, and their memory with them, so that nothing is read any more."""
        for import_id in list(self._reads):
            for rank in range(self._shares.num_ranks):
                self._read_ended(rank, ReadEnd(import_id, RANKS_LOST, 0.0))

    def _read_ended(self, rank: int, end: ReadEnd) -> None:
        """Note how a rank's part of a read ended; after the last one, report the first error and the longest time. Ranks may call
        this on threads of their own, so that the report may come twice."""
        ends, on_end = self._reads.get(end.read_id, ([], lambda error, seconds: None))
        if ends and ends[rank] is None:
            ends[rank] = end
            if None not in ends:
                all_ends = [one for one in ends if one is not None]
                on_end(next((one.error for one in all_ends if one.error), ""), max(one.seconds for one in all_ends))

    def _lend_any(self, num_hash_blocks: int) -> BlockExport | None:
        """Lend cached blocks of any prefixes, as many as this many hash blocks have in the groups that keep every token; None if
        there are fewer."""
        blocks: list[ExportedBlock] = []
        num_tokens = num_hash_blocks * self._cache.block_size
        for group, retention in enumerate(self._scheduler.policy_retentions.of(None)):
            wanted = num_tokens // retention.block_size if retention.keeps_everything else 0
            held = [(tier, block) for tier in (DEVICE, HOST) for block in self._cache.index.tiers[tier][group].values()]
            if len(held) < wanted:
                return None
            blocks += [ExportedBlock(group, logical, *place) for logical, place in enumerate(held[:wanted])]
        return self._cache.tiers.exports.lend(blocks)

    def _digests(self, export_id: str, query: PrefixQuery, block: BlockRange) -> tuple[bytes, ...]:
        """Return the digest of a block of an export for each rank of the target. This waits for the plans in flight, whose copies
        may yet write this block or others of the export."""
        assert query.shares is not None
        parts = convert_blocks(self._shares, query.shares, block.group, self.read_export(export_id, block))
        return tuple(
            block_digest(self._shares, query.shares, block.group, rank, part) for rank, part in enumerate(parts)
        )

    def _query(self, chain: tuple[bytes, ...], num_tokens: int, policy: KvPolicy | None) -> PrefixQuery:
        return PrefixQuery(
            chain=chain,
            num_tokens=num_tokens,
            groups=self._cache.shape.groups,
            block_size=self._cache.block_size,
            identity=self._cache.identity,
            shares=self._shares if self.memories else None,
            kv_policy=policy if isinstance(policy, WindowPolicy) else None,
        )

    def _find(self, query: PrefixQuery) -> PrefixHit:
        """Return the hit here of a request that continues the query's prefix; its one more token (`+ 1`) is never a hit."""
        retentions = self._scheduler.policy_retentions.of(query.kv_policy)
        return self._cache.find(query.chain, len(query.chain) * self._cache.block_size + 1, retentions)

    def _pieces(self, offer: PrefixOffer, group: int, missing: Sequence[int]) -> list[tuple[BlockRange, int]]:
        """Divide the missing blocks of a group into pieces, and return each with its bytes at the source.

        A piece is at most `PIECE_BYTES` at the source, and on any rank here; but at least one block.
        """
        of_source = sum(groups[group].block_bytes for groups in offer.shares.groups)
        most = max(1, PIECE_BYTES // max(of_source, *(groups[group].block_bytes for groups in self._shares.groups)))
        pieces = [BlockRange(group, tuple(missing[at : at + most])) for at in range(0, len(missing), most)]
        return [(piece, of_source * len(piece.blocks)) for piece in pieces]


def _runs_of_tiers(places: Sequence[tuple[int, int]]) -> list[tuple[int, list[int]]]:
    """Divide (tier, block) pairs into runs of one tier, in order."""
    runs: list[tuple[int, list[int]]] = []
    for tier, block in places:
        if not runs or runs[-1][0] != tier:
            runs.append((tier, []))
        runs[-1][1].append(block)
    return runs
