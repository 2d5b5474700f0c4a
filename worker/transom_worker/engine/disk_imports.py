"""`DiskImports`: brings the prefixes of new requests from the disk tier into the host tier, while other requests run.

    begin        a new request's prefix continues on the disk: host blocks are taken, and the ranks load files into them. The
                 request is *held* until the load has ended; it is not in the queue
    ended        the ranks have reported the load. Its blocks are published, and the request is admitted like any other: it finds
                 a hit in the host tier, where `KeptImports` keeps the blocks for it. If a file was missing or broken, the
                 blocks are freed, and the prefix is computed

Requests with the same prefix wait for the same load. An import is worth its time where it spares `MIN_SPARED_TOKENS` tokens, and
where reading their blocks takes less time than computing them, by what earlier loads took.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from transom_worker.contract import Request
from transom_worker.disk_cache.folder import BlockFolder
from transom_worker.engine.kept_imports import KeptImports
from transom_worker.kvcache.hashing import chain_root, extend_chain
from transom_worker.kvcache.imports import BlockImport
from transom_worker.kvcache.manager import KvCache
from transom_worker.kvcache.prefix_search import PrefixHit, find_in_tiers, hit_limit
from transom_worker.scheduling.step import StepResult

MIN_SPARED_TOKENS = 128
NS_PER_BYTE = 1.0  # of loads from the disk, before any was measured
NEWEST_SHARE = 0.3  # with which a measurement changes the estimate


@dataclass(slots=True)
class _Import:
    blocks: BlockImport
    num_bytes: int
    request_ids: list[str] = field(default_factory=list)


class DiskImports:
    """The imports of one engine. `stop_holding` lets a request be admitted; `is_waiting` says whether one still waits for that."""

    def __init__(
        self,
        cache: KvCache,
        folder: BlockFolder,
        kept: KeptImports,
        *,
        stop_holding: Callable[[str], object],
        is_waiting: Callable[[str], bool],
    ) -> None:
        self._cache, self._kept = cache, kept
        self._stop_holding, self._is_waiting = stop_holding, is_waiting
        self._on_disk = [_OnDisk(folder, group) for group in range(len(cache.pools))]
        self._requests: dict[str, Request] = {}  # held ones, by id
        self._loading: dict[int, _Import] = {}  # by ticket
        self._ns_per_byte = NS_PER_BYTE

    @property
    def is_loading(self) -> bool:
        """Whether a load has not been reported yet."""
        return bool(self._loading)

    def begin(self, request: Request) -> bool:
        """Begin an import for a new request, or let it wait for one that is under way; False if it need not be held."""
        if not self._import(request):
            return False
        self._requests[request.request_id] = request
        return True

    def step_done(self, result: StepResult) -> None:
        """Take note of the loads that have ended."""
        for ticket, seconds in zip(result.loaded, result.load_s, strict=True):
            if (ended := self._loading.pop(ticket, None)) is not None:
                self._kept.publish(ended.blocks, ended.request_ids)
                self._measure(ended.num_bytes, seconds)
                self._go_on(ended)
        for ticket in result.failed:
            if (ended := self._loading.pop(ticket, None)) is not None:
                self._cache.end_import(ended.blocks)
                self._go_on(ended)

    def forget(self) -> None:
        """End all loads, since the ranks were restarted, and none will be reported. All requests have ended."""
        for one in self._loading.values():
            self._cache.end_import(one.blocks)
        self._loading, self._requests = {}, {}

    def _import(self, request: Request) -> bool:
        """Begin an import, or join the request to one; return whether there is one that the request waits for."""
        if not _reads_cache(request):
            return False
        cache = self._cache
        tokens = [*request.prompt_token_ids, *request.resumed_output_ids]
        limit = hit_limit(len(tokens), cache.block_size)
        chain: list[bytes] = []
        extend_chain(chain, chain_root(cache.block_size, cache_salt=request.cache_salt), tokens, cache.block_size)
        here = self._find(chain, limit, with_disk=False)
        if not self._may_continue(chain, here):
            return False
        there = self._find(chain, limit, with_disk=True)
        if there.start - here.start < MIN_SPARED_TOKENS:
            return False
        if (under_way := self._bringing(chain[: there.num_hash_blocks])) is not None:
            under_way.request_ids.append(request.request_id)
            return True
        return self._begin(request, chain, there, spared_tokens=there.start - here.start)

    def _begin(self, request: Request, chain: Sequence[bytes], hit: PrefixHit, *, spared_tokens: int) -> bool:
        cache = self._cache
        blocks = cache.import_blocks(chain, hit)
        if blocks is None:
            return False
        num_bytes = sum(cache.layout.groups[one.group].block_bytes for one in blocks.blocks)
        rates = cache.changes.rates
        if rates is not None and num_bytes * self._ns_per_byte > spared_tokens * rates.token_ns:
            cache.end_import(blocks)
            return False
        self._loading[cache.fetch_import(blocks)] = _Import(blocks, num_bytes, [request.request_id])
        return True

    def _find(self, chain: Sequence[bytes], limit: int, *, with_disk: bool) -> PrefixHit:
        cache = self._cache
        tiers: list[tuple[Container[bytes], ...]] = []
        for group, on_disk in enumerate(self._on_disk):
            known = [tier[group] for tier in cache.index.tiers]
            tiers.append((*known, on_disk) if with_disk else tuple(known))
        return find_in_tiers(cache.retentions, tiers, chain, limit, window_repair=cache.window_repair)

    def _may_continue(self, chain: Sequence[bytes], here: PrefixHit) -> bool:
        """Return whether the disk has the next block of a group behind a hit. For most prompts it has not: no search is needed."""
        for group, retention in enumerate(self._cache.retentions):
            step = retention.block_size // self._cache.block_size
            after = (here.num_hash_blocks // step + 1) * step
            if retention.keeps_everything and here.full_groups_reach < after <= len(chain):
                return chain[after - 1] in self._on_disk[group]
        return True

    def _bringing(self, chain: Sequence[bytes]) -> _Import | None:
        """Return the import under way that brings a block of a chain."""
        wanted = set(chain)
        return next((one for one in self._loading.values() if one.blocks.blocks[-1].digest in wanted), None)

    def _go_on(self, ended: _Import) -> None:
        """Let the requests of an import that has ended be admitted, unless there is more for one to wait for."""
        for request_id in ended.request_ids:
            request = self._requests.get(request_id) if request_id != ended.request_ids[0] else None
            if request is not None and self._is_waiting(request_id) and self._import(request):
                continue
            self._requests.pop(request_id, None)
            self._stop_holding(request_id)

    def _measure(self, num_bytes: int, seconds: float) -> None:
        self._ns_per_byte += NEWEST_SHARE * (seconds * 1e9 / num_bytes - self._ns_per_byte)


class _OnDisk:
    """The digests of one group's blocks that have files; whether they are whole shows when they are read."""

    def __init__(self, folder: BlockFolder, group: int) -> None:
        self._folder, self._group = folder, group

    def __contains__(self, digest: object) -> bool:
        return isinstance(digest, bytes) and self._folder.has(self._group, digest)


def _reads_cache(request: Request) -> bool:
    """Whether a request may begin at a hit among the blocks that are kept on the disk."""
    return request.kv_policy is None and not request.kv_quality and request.params.prompt_logprobs is None
