"""A KV cache of made-up blocks for tests of the transfer protocol: digests are names, and a block's bytes say what it is."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import numpy as np

from transom_core.contract import Request
from transom_core.contract.kv_transfer import BlockRange, PrefixOffer, PrefixQuery, RankMemory
from transom_core.contract.prefix_peers import Bytes
from transom_core.kv_cache.groups import GroupKind, GroupSpec
from transom_core.kv_cache.kv_shares import KvShares
from transom_worker.engine.transfer.store import ImportPlan, TransferStore
from transom_worker.telemetry.transfer_report import ExportOutcome, FetchReport, TransferObserver

T = TypeVar("T")

BLOCK = 4
BLOCK_BYTES = 8
GROUPS = (GroupSpec(name="full", kind=GroupKind.FULL, layers=(0,), block_size=BLOCK),)
SHARES = KvShares(groups=((),), heads=((),))


def chain(name: str, length: int) -> tuple[bytes, ...]:
    return tuple(f"{name}{i}".encode() for i in range(length))


def contents(digest: bytes) -> Bytes:
    return np.frombuffer(digest.ljust(BLOCK_BYTES, b"."), np.uint8)


@dataclass
class FakeStore(TransferStore):
    """One worker's cache. `requests` are the chains of held requests; `num_free` bounds imports."""

    cached: dict[bytes, Bytes] = field(default_factory=dict)
    requests: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    groups: tuple[GroupSpec, ...] = GROUPS
    num_free: int = 100
    blocks_per_piece: int = 2
    exports: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    imports: dict[str, dict[bytes, Bytes]] = field(default_factory=dict)
    chains: dict[str, tuple[bytes, ...]] = field(default_factory=dict)  # by import
    kept_for: list[str] = field(default_factory=list)  # request ids
    # Reads of another worker's memory: how many looks they take, what they bring of a block, and by import those in flight.
    num_looks: int | None = None  # None: this worker does not read memory
    bring: Callable[[bytes], Bytes] = contents
    reads: dict[str, tuple[PrefixOffer, Callable[[str, float], None]]] = field(default_factory=dict)

    def open_export(
        self, export_id: str, query: PrefixQuery, *, more_than: int = 0, num_held: int = 0
    ) -> PrefixOffer | None:
        if query.groups != self.groups:
            raise ValueError("other groups")
        held = tuple(query.chain[: self._length(query.chain)])
        if len(held) <= more_than:
            return None
        self.exports[export_id] = held
        blocks = (tuple(range(num_held, len(held))),)
        return PrefixOffer(
            export_id=export_id,
            num_hash_blocks=len(held),
            start=BLOCK * len(held),
            blocks=blocks,
            shares=SHARES,
            memories=() if query.shares is None else (RankMemory(agent=b"", regions={}),),
            digests=({i: (contents(held[i]).tobytes(),) for i in blocks[0][0 if query.verifies_all else -1 :]},),
        )

    def read_export(self, export_id: str, blocks: BlockRange) -> Sequence[bytes]:
        digests = self.exports[export_id]
        return [b"".join(contents(digests[i]).tobytes() for i in blocks.blocks)]

    def close_export(self, export_id: str) -> None:
        self.exports.pop(export_id, None)

    def awaits_copies(self, import_id: str) -> bool:
        return False

    def open_early(
        self, export_id: str, request_id: str, query: PrefixQuery, *, more_than: int, num_held: int
    ) -> PrefixOffer | None:
        return self.open_export(export_id, query, more_than=more_than, num_held=num_held)

    def handed_over(self, request: Request) -> PrefixQuery:
        query = self.query(request.request_id, BLOCK * len(self.requests[request.request_id]))
        assert query is not None
        return query

    def own_query(self, query: PrefixQuery) -> PrefixQuery | None:
        return replace(query, is_early=True) if query.groups == self.groups else None

    def query(self, request_id: str, num_tokens: int) -> PrefixQuery | None:
        digests = self.requests.get(request_id, ())[: num_tokens // BLOCK]
        if not digests:
            return None
        shares = None if self.num_looks is None else SHARES
        return PrefixQuery(chain=digests, num_tokens=0, groups=self.groups, block_size=BLOCK, shares=shares)

    def probe(self, num_bytes: int, *, by_calls: bool) -> PrefixQuery | None:
        return None

    def has(self, request_id: str, query: PrefixQuery) -> bool:
        return self._length(query.chain) == len(query.chain)

    def begin_import(
        self, import_id: str, query: PrefixQuery, offer: PrefixOffer
    ) -> ImportPlan | Literal["present", "no_space", "not_found"]:
        missing = [i for i in offer.blocks[0] if query.chain[i] not in self.cached]
        if len(missing) > self.num_free:
            return "no_space"
        self.num_free -= len(missing)
        self.imports[import_id] = {query.chain[i]: np.zeros(BLOCK_BYTES, np.uint8) for i in missing}
        at = range(0, len(missing), self.blocks_per_piece)
        ranges = [BlockRange(0, tuple(missing[i : i + self.blocks_per_piece])) for i in at]
        self.chains[import_id] = query.chain
        return ImportPlan(
            pieces=tuple((one, BLOCK_BYTES * len(one.blocks)) for one in ranges),
            num_tokens=BLOCK * len(missing),
            num_blocks=len(missing),
            full_length_bytes=BLOCK_BYTES * len(missing),
        )

    def convert(self, offer: PrefixOffer, blocks: BlockRange, data: Sequence[Bytes]) -> Sequence[Bytes]:
        return data

    def write_import(self, import_id: str, blocks: BlockRange, data: Sequence[Bytes]) -> None:
        for i, block in zip(blocks.blocks, data[0].reshape(-1, BLOCK_BYTES), strict=True):
            self.imports[import_id][self.chains[import_id][i]] = block

    def publish_import(self, import_id: str, request_ids: Iterable[str], *, is_awaited: bool = False) -> None:
        blocks = self.imports.pop(import_id)
        assert all(np.array_equal(block, contents(digest)) for digest, block in blocks.items())
        self.cached.update(blocks)
        self.kept_for += [*request_ids, *["awaited"] * is_awaited]

    def end_admitted(self) -> None:
        pass

    def drop_import(self, import_id: str) -> bool:
        self.take_read_ends()
        if import_id in self.reads:
            return False
        self.num_free += len(self.imports.pop(import_id, {}))
        return True

    def begin_read(self, import_id: str, offer: PrefixOffer, on_end: Callable[[str, float], None]) -> None:
        self.reads[import_id] = offer, on_end

    def take_read_ends(self) -> None:
        if self.num_looks:
            self.num_looks -= 1
            return
        while self.reads:
            import_id, (offer, on_end) = self.reads.popitem()
            chain = self.chains[import_id]
            found = self.imports[import_id] = {digest: self.bring(digest) for digest in self.imports[import_id]}
            wanted = {chain[i]: digest for i, (digest,) in offer.digests[0].items() if chain[i] in found}
            is_equal = all(found[name].tobytes() == digest for name, digest in wanted.items())
            on_end("" if is_equal else "other bytes", 0.5)

    def put(self, digests: Sequence[bytes]) -> None:
        """Cache blocks."""
        self.cached.update({digest: contents(digest) for digest in digests})

    def _length(self, digests: Sequence[bytes]) -> int:
        return next((i for i, digest in enumerate(digests) if digest not in self.cached), len(digests))


def on_loop(function: Callable[[], T]) -> Awaitable[T]:
    """Plays the engine's thread: runs functions in order, in a later turn of the event loop, awaited or not."""
    future: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def run() -> None:
        if future.cancelled():
            return
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    asyncio.get_running_loop().call_soon(run)
    return future


@dataclass
class Notes(TransferObserver):
    """What was reported."""

    reports: list[FetchReport] = field(default_factory=list)
    exports: list[ExportOutcome] = field(default_factory=list)
    num_bytes: int = 0

    def fetched(self, report: FetchReport) -> None:
        self.reports.append(replace(report, seconds=0.0, read_s=0.0))

    def exported(self, outcome: ExportOutcome) -> None:
        self.exports.append(outcome)

    def sent(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
