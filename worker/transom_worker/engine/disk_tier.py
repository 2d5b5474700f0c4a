"""`EngineDiskTier`: uses the disk tier for one engine. It follows which files exist (`disk.watch`), reads the prefixes of new
requests from files into the host tier while other requests run, and writes the cached prefixes to files when the engine is stopped.

    begin      the hit search finds that a new request's prefix continues on the disk, and that reading it takes less time than
               computing it (`transom_core.kv_cache.prefix_search`): host blocks are taken, and the ranks load the files into them.
               The request is *held* outside of the queue
    step_done  the ranks have reported the load: its blocks are published, and the request is admitted like any other. It finds
               a hit in the host tier, where `KeptImports` keeps the blocks for it. If a file was missing or broken, the
               blocks are freed, and the prefix is computed
    flush      the engine is stopped: the ranks write the cached prefixes

Requests with the same prefix wait for the same load, and clients take turns at reading by bytes (`LoadTurns`). When a load's last
request has ended, those of its pieces that still wait are not read. How long reading takes is learned from earlier loads. It is
part of the rates that routers know (`load_rates`), so that they predict the same hit.

A disk may hang, because it dies or because its file server does not answer. So a load that the ranks have begun has a time
limit for each of its pieces (`_limit_s`). If it is *late*, the disk is *away*: the requests of all loads go on by computing,
and the rates say that reading takes for ever, so that neither this worker nor a router finds a hit there. (The index is not
emptied: removing a million files from it would be a message of 32 MB to each router.) The host blocks of a load that was *given
up* stay taken while the ranks may still write into them. When the ranks report that such a load was read, the disk is used
again; for that, an engine without other work asks the ranks once with each listing of the folder. A load that fails does not
show that the disk answers. If all loads that were given up have failed, the disk is tried again with the next listing, without
the blocks that failed.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from transom_core.client_queue import Sharer
from transom_core.contract import Request
from transom_core.kv_cache.hashing import extend_chain
from transom_worker.execution.executor import Executor
from transom_worker.kvcache.tiers.disk.folder import BlockFolder
from transom_worker.kvcache.tiers.disk.watch import DiskWatch
from transom_worker.kvcache.tiers.imports import BlockImport, KeptImports
from transom_worker.scheduling.rate_meter import ReadMeter
from transom_worker.scheduling.scheduler import Scheduler
from transom_worker.scheduling.step import StepResult

logger = logging.getLogger("transom.worker")

FLUSH_S = 5.0  # the most time for which a stopped engine writes cached prefixes
FLUSH_PIECE_BYTES = 8 << 20  # of each rank, in one plan
LATE_S = 10.0  # how long a load may take in any case
LATE_FACTOR = 4  # a load may take this many times its estimate more, since other processes read from the disk, too
# The nanoseconds for reading a block, in the rates, while the disk is away: more than computing any block takes.
AWAY_NS = 10**12


@dataclass(slots=True)
class _Held:
    """A request that waits for an import. With the import it will start at token `start`, without it at `memory_start`."""

    request: Request
    memory_start: int
    start: int


@dataclass(slots=True)
class _Import:
    """An unfinished import, which a request of `sharer` began; from `limit_s` on, on the tier's clock, it is late.

    `progress` is what `LoadTurns.progress` said last: the limit begins anew when it changes.
    """

    sharer: Sharer
    blocks: BlockImport
    estimate_s: float
    limit_s: float
    held: list[_Held] = field(default_factory=list)
    progress: int | None = None
    is_given_up: bool = False


class EngineDiskTier:
    """The disk tier of one engine. The engine's thread calls all methods.

    `scheduler` has the held requests. `end_hold(id, num_tokens)` lets a request be admitted, for which `num_tokens` tokens were
    imported. `kept` keeps imported blocks until their requests are admitted. `clock` gives seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        folder: BlockFolder,
        kept: KeptImports,
        *,
        end_hold: Callable[[str, int], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler, self._cache, self._kept, self._end_hold = scheduler, scheduler.cache, kept, end_hold
        self._clock = clock
        tiers = self._cache.tiers
        tiers.open_disk(self._cache.layout)
        self.watch = DiskWatch(folder, tiers.disk)
        self._meter = ReadMeter([group.block_bytes for group in self._cache.layout.groups])
        self._loading: dict[int, _Import] = {}  # by ticket
        self._read_ns: tuple[int, ...] | None = None  # while the disk is away: the rates of reads before; else None

    @property
    def is_away(self) -> bool:
        """Whether a load was late, and the disk has not answered since."""
        return self._read_ns is not None

    @property
    def is_busy(self) -> bool:
        """Whether a request waits for a load from the disk, or the watch has news."""
        return any(not one.is_given_up for one in self._loading.values()) or self.watch.has_news

    def take_news(self) -> None:
        """Apply the watch's news to the index, and give up loads that have become late."""
        was_listed = self.watch.has_news
        self.watch.take_news()
        wanted = [one for one in self._loading.values() if not one.is_given_up]
        if any([self._is_late(one) for one in wanted]):  # a list, since each of them notes its progress
            self._leave()
            for one in wanted:
                self._give_up(one)
            for one in wanted:
                self._go_on(one, was_read=False)
        if self.is_away and was_listed and not self._loading:
            self._come_back()

    def begin(self, request: Request) -> bool:
        """Begin to import the prefix of a new request, and return True; False if the request need not be held."""
        self.watch.take_news()
        if self.is_away or not request.reads_prefix_cache:
            return False
        held = self._import(request)
        if held is None:
            self._meter.not_made()
            self._set_rates()
        return held is not None

    def _import(self, request: Request) -> _Held | None:
        """Begin or join the import of a request's prefix; None if there is nothing to wait for."""
        cache, sequence = self._cache, self._scheduler.by_request[request.request_id]
        extend_chain(sequence.chain, sequence.root, sequence.token_ids, cache.block_size)
        hit = cache.find(sequence.chain, len(sequence.token_ids), sequence.retentions, with_disk=True)
        if not hit.num_read:
            return None
        under_way = self._bringing(sequence.chain[: hit.num_hash_blocks])
        if self._is_crowded(request.sharer, under_way, self._reading_s(hit.num_read), hit.start - hit.memory_start):
            return None
        if under_way is None:
            blocks = cache.tiers.imports.begin(sequence.chain, hit, sequence.retentions)
            if blocks is None:
                return None
            estimate_s = self._reading_s(self._num_blocks(blocks))
            under_way = _Import(request.sharer, blocks, estimate_s, self._clock() + self._limit_s(estimate_s))
            self._loading[cache.tiers.imports.fetch(blocks, request.sharer)] = under_way
        under_way.held.append(held := _Held(request, hit.memory_start, hit.start))
        return held

    def step_done(self, result: StepResult) -> None:
        """Publish the loads that a step's result reports as read, and end those that it reports as failed."""
        for ticket, seconds in zip(result.loaded, result.load_s, strict=True):
            if (ended := self._loading.pop(ticket, None)) is None:
                continue
            if ended.is_given_up:
                self._cache.tiers.imports.end(ended.blocks)
                self._come_back()
            else:
                self._kept.publish(ended.blocks, [held.request.request_id for held in ended.held])
                self._meter.made(self._num_blocks(ended.blocks), seconds)
                self._set_rates()
                self._go_on(ended, was_read=True)
        for ticket in result.failed:
            if (ended := self._loading.pop(ticket, None)) is None:
                continue
            self._cache.tiers.imports.end(ended.blocks)
            self.watch.forget([(one.group, one.digest) for one in ended.blocks.blocks])
            if not ended.is_given_up:
                self._go_on(ended, was_read=False)

    def cancel(self, request: Request) -> None:
        """Note that a request has ended: what was read for it alone, and waits for its turn, is not read."""
        for one in list(self._loading.values()):
            if one.is_given_up or not any(held.request is request for held in one.held):
                continue
            one.held = [held for held in one.held if held.request is not request]
            if not one.held and self._cache.copies.reads.num_waiting(one.blocks.ticket):
                self._give_up(one)

    def _give_up(self, unwanted: _Import) -> None:
        """Publish nothing of an import, and read no more of it; it ends when the ranks have reported what they read of it now."""
        unwanted.is_given_up = True
        self._cache.tiers.imports.give_up(unwanted.blocks)
        if not self._cache.copies.reads.cut(unwanted.blocks.ticket):
            del self._loading[unwanted.blocks.ticket]
            self._cache.tiers.imports.end(unwanted.blocks)

    def forget_loads(self) -> None:
        """End all imports, since the ranks were restarted. The caller has ended all requests."""
        for one in self._loading.values():
            self._cache.tiers.imports.end(one.blocks)
        self._loading = {}
        self._come_back()

    def flush(self, executor: Executor) -> None:
        """Have the ranks write cached prefixes to files, the most valuable ones first, for at most `FLUSH_S`."""
        until_s = time.perf_counter() + FLUSH_S
        try:
            executor.drop_in_flight()
            for plan in self._scheduler.plans_to_store_all(piece_bytes=FLUSH_PIECE_BYTES):
                if time.perf_counter() >= until_s:
                    break
                executor.submit(plan)
                executor.receive()
        except Exception as error:  # the engine must end, even if the cache is lost
            logger.warning("What is cached could not be written to the disk tier: %s", error)

    def _is_crowded(self, sharer: Sharer, under_way: _Import | None, own_s: float, spared_tokens: int) -> bool:
        """Return whether the loads of other clients take longer than computing `spared_tokens` tokens, which a load would spare.

        The load is a new one, for which this client reads for `own_s`, or one that is `under_way`. While a client reads for a
        second, each other client may read for a second too, in the ratio of their weights, after what is in flight.
        """
        totals_s: dict[Sharer, float] = {}
        for one in self._loading.values():
            totals_s[one.sharer] = totals_s.get(one.sharer, 0.0) + one.estimate_s
        reader = sharer if under_way is None else under_way.sharer
        turns_s = totals_s.get(reader, 0.0) + (own_s if under_way is None else 0.0)
        window_s = self._cache.copies.reads.window_s
        others_s = sum(
            total_s if other == reader else min(total_s, window_s + turns_s * other.weight / reader.weight)
            for other, total_s in totals_s.items()
            if other.client != sharer.client
        )
        rates = self._cache.changes.rates
        return rates is not None and others_s * 1e9 > spared_tokens * rates.token_ns

    def _bringing(self, chain: Sequence[bytes]) -> _Import | None:
        """Return an unfinished import, not given up, that brings blocks of a chain; None if there is none."""
        wanted = set(chain)
        in_time = (one for one in self._loading.values() if not one.is_given_up)
        return next((one for one in in_time if one.blocks.blocks[-1].digest in wanted), None)

    def _is_late(self, loading: _Import) -> bool:
        """Return whether the ranks take too long for a piece of a load; a load that waits for its turn is not late."""
        progress = self._cache.copies.reads.progress(loading.blocks.ticket)
        if progress is None or progress != loading.progress:
            loading.progress = progress
            loading.limit_s = self._clock() + self._limit_s(loading.estimate_s)
        return self._clock() >= loading.limit_s

    def _go_on(self, ended: _Import, *, was_read: bool) -> None:
        """Let the requests of an ended import be admitted. All but the first may continue to wait for another import: their prefix
        may be longer than the first one's."""
        for held in ended.held:
            if not self._waits(held.request):
                continue
            more = None if held is ended.held[0] else self._import(held.request)
            if more is None:
                self._end_hold(held.request.request_id, held.start - held.memory_start if was_read else 0)
            else:
                more.memory_start = min(more.memory_start, held.memory_start)

    def _waits(self, request: Request) -> bool:
        """Return whether a request still waits for admission. If it has ended, another request may have its id."""
        sequence = self._scheduler.by_request.get(request.request_id)
        return sequence is not None and sequence.request is request and not sequence.was_admitted

    def _leave(self) -> None:
        """Stop reading from the disk, because a load is late."""
        rates = self._cache.changes.rates
        if rates is None or self.is_away:
            return
        logger.error("The disk cache does not answer. Requests compute their prefixes until it does.")
        self._read_ns = rates.read_ns
        self._cache.changes.set_rates(rates._replace(read_ns=(AWAY_NS,) * len(rates.read_ns)))
        self.watch.always_has_news = True

    def _come_back(self) -> None:
        """Read from the disk again."""
        rates, read_ns = self._cache.changes.rates, self._read_ns
        if rates is None or read_ns is None:
            return
        logger.info("The disk cache answers again.")
        self._read_ns = None
        self._cache.changes.set_rates(rates._replace(read_ns=read_ns))
        self.watch.always_has_news = False

    def _limit_s(self, estimate_s: float) -> float:
        """Return how long a load may take whose own reading is estimated to take `estimate_s`; it waits for unfinished loads."""
        return LATE_S + LATE_FACTOR * (estimate_s + sum(one.estimate_s for one in self._loading.values()))

    def _reading_s(self, num_blocks: Sequence[int]) -> float:
        rates = self._cache.changes.rates
        return 0.0 if rates is None else rates.reading_ns(num_blocks) / 1e9

    def _num_blocks(self, blocks: BlockImport) -> list[int]:
        """Return how many blocks of each group an import brings."""
        num_blocks = [0] * len(self._cache.pools)
        for one in blocks.blocks:
            num_blocks[one.group] += 1
        return num_blocks

    def _set_rates(self) -> None:
        """Give the cache new rates if what was learned about reading differs from them."""
        if self.is_away:
            return
        present = self._cache.changes.rates
        if present is not None and (rates := self._meter.next_rates(present)) is not None:
            self._cache.changes.set_rates(rates)
