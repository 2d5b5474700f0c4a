"""`PrefixFetches`: the target's side of KV transfer, which brings a held request's prefix from another worker.

- **held request**: a request that the engine does not admit before its fetch has ended, with or without success.
- **piece**: some blocks of one group that move together (`contract.kv_transfer.PIECE_BYTES`).

One fetch, from a request to its end:

    query     the digests of the prefix                    (`TransferStore.query`)
    export    the source lends its blocks, and offers them (`PrefixPeers.open_export`), or has offered them (`fetch_early`)
    import    blocks are taken for what is missing         (`TransferStore.begin_import`)
    pieces    are brought by one of two wires              (`wires`)
    publish   when all pieces have come; `on_end` is called in the same turn of the engine, so that its next step has the request
    close     in any case the export is closed once nothing is read any more; only an early fetch waits for it, before `publish`

Requests that need the same prefix from the same source, such as the choices of one prompt, fetch it one after another, so that all
but the first find it here; all wait for early fetches. A fetch runs on the worker's event loop and touches the cache on the
engine's thread. It ends after `TransferConfig.timeout_s` at the latest. Sources that do not answer are left alone for a while
(`wires`).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4
from weakref import WeakValueDictionary

from transom_core.client_queue import NO_CLIENT, Sharer
from transom_core.config import TransferConfig
from transom_core.contract import PrefixSource, Request
from transom_core.contract.kv_transfer import PrefixOffer, PrefixQuery
from transom_core.contract.prefix_peers import PrefixPeers
from transom_worker.engine.transfer.store import ImportPlan, OnEngine, TransferStore
from transom_worker.engine.transfer.wires import LEASE_CLOCK, LOOK_S, CallWire, MemoryWire, SourceLost
from transom_worker.kvcache.tiers.imports import MAX_AWAITED_S
from transom_worker.telemetry.transfer_report import FetchOutcome, FetchReport, TransferObserver

logger = logging.getLogger("transom.worker")

DROP_AGAIN_S = 0.05  # between two tries to free the blocks of an import into which ranks still read

OnEnd = Callable[[str, FetchReport], None]
"""Called with a request's id when its fetch has ended, exactly once unless the request was cancelled; and with "" for each early
fetch. Any thread may call it."""


class _Ended(Exception):
    """Ends a fetch with an outcome that is not an error of this worker, such as "not_found"."""

    def __init__(self, outcome: FetchOutcome) -> None:
        self.outcome = outcome


class _Waiting(NamedTuple):
    """A held request that waits until its prefix is here, since `begin_s`."""

    request_id: str
    source: PrefixSource
    query: PrefixQuery
    begin_s: float


class PrefixFetches:
    """The fetches of one worker. All methods run on its event loop."""

    def __init__(
        self,
        peers: PrefixPeers,
        store: TransferStore,
        on_engine: OnEngine,
        config: TransferConfig,
        *,
        on_end: OnEnd,
        observer: TransferObserver,
    ) -> None:
        self._peers, self._store, self._on_engine = peers, store, on_engine
        self._config, self._on_end, self._observer = config, on_end, observer
        self.calls = CallWire(peers, store, on_engine, config)
        self.memory_wire = MemoryWire(self.calls, config)
        self._tasks: dict[str, asyncio.Task[FetchReport]] = {}  # by request id
        self._held: set[str] = set()  # the ids for which `on_end` was not called yet
        self._reporting: set[asyncio.Task[Any]] = set()  # fetches that have published their blocks
        self._measuring = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        # (source, last digest of the prefix, whether early) -> a lock, so that one fetch brings a prefix at a time. An early one
        # does not wait for a request, which may wait for the source's step. An entry vanishes when no fetch uses its lock any more.
        self._turns: WeakValueDictionary[tuple[str, bytes, bool], asyncio.Lock] = WeakValueDictionary()
        self._waiting: dict[str, _Waiting] = {}  # by request id

    def __len__(self) -> int:
        return len(self._tasks)

    def wanted_by(self, requests: Sequence[Request], own_id: str) -> dict[str, Request]:
        """Return, by id, the requests for which the router has named another worker as the source of their prefix.

        Of the requests for a source that does not answer calls (`wires`), one is returned each `AWAY_S`.
        """
        sources = ((one, one.prefix_source) for one in requests)
        return {
            one.request_id: one
            for one, source in sources
            if source is not None and source.worker != own_id and self.calls.away.is_asked(source.worker)
        }

    def start(self, request: Request) -> None:
        """Begin to fetch the prefix of a held request; `on_end` is called at the end."""
        assert request.prefix_source is not None
        request_id, limit_s = request.request_id, self._config.timeout_s
        if request.time_left_s is not None:
            limit_s = min(limit_s, request.time_left_s)
        source = request.prefix_source
        self._held.add(request_id)
        task = asyncio.create_task(self._reported(request_id, source, self._fetch(request, source), limit_s))
        self._tasks[request_id] = task
        task.add_done_callback(partial(self._done, request_id))

    def _done(self, request_id: str, task: asyncio.Task[FetchReport]) -> None:
        self._reporting.discard(task)
        if self._tasks.get(request_id) is task:  # not of a later request with this id
            del self._tasks[request_id]

    def cancel(self, request_id: str) -> None:
        """End the fetch of a request that has ended, without calling `on_end`. Ids without a fetch are ignored. A fetch that has
        published its blocks goes on, since it has only its report to make."""
        self._held.discard(request_id)
        task = self._tasks.get(request_id)
        if task is not None and task not in self._reporting:
            self._tasks.pop(request_id).cancel()

    def own_query(self, query: PrefixQuery) -> PrefixQuery | None:
        """Return a source's query as this worker asks it; None if it has another model or other groups."""
        own = self._store.own_query(query)
        return None if own is None else replace(own, verifies_all=self._config.verify == "all")

    async def fetch_early(self, source: PrefixSource, query: PrefixQuery, offer: PrefixOffer, sharer: Sharer) -> bool:
        """Fetch what `source` offers of a prompt that it computes (`handovers`), and return whether it is here then. If it is the
        whole prompt, the request that continues it waits for this."""
        if self._store.own_query(query) is None:
            return False  # another model meanwhile
        async with self._turn(source.worker, query.chain[offer.num_hash_blocks - 1], is_early=True):
            try:
                fetch = self._import("", sharer, source, query, offer)
                report = await self._reported("", source, fetch, self._config.timeout_s)
            finally:
                if offer.num_hash_blocks == len(query.chain):
                    # An idle engine takes no turn in which it would end what was kept for a request that does not come.
                    after_s, end = 1.1 * MAX_AWAITED_S, self._store.end_admitted
                    asyncio.get_running_loop().call_later(after_s, self._on_engine, end)
        return report.outcome in ("fetched", "present")

    async def measure(self, source: PrefixSource, num_bytes: int, *, by_calls: bool) -> FetchReport:
        """Bring about `num_bytes` of cached blocks of any prefixes from a source as a fetch does, and drop them; one measurement
        at a time."""
        async with self._measuring:
            query = await self._on_engine(lambda: self._store.probe(num_bytes, by_calls=by_calls))
            if query is None:
                return FetchReport(source=source.worker, outcome="refused")
            fetch = self._ask_and_import(None, NO_CLIENT, source, query)
            return await self._reported(None, source, fetch, self._config.timeout_s)

    async def _reported(
        self, request_id: str | None, source: PrefixSource, fetch: Awaitable[FetchReport], limit_s: float
    ) -> FetchReport:
        """Wait for a fetch, and report how it ended, of a probe (None) to the observer alone. A cancelled fetch reports nothing:
        `CancelledError` passes through. However it ends, both sides release their blocks."""
        begin_s = time.monotonic()
        outcome: FetchOutcome = "failed"
        try:
            async with asyncio.timeout(limit_s):
                report = await fetch
            self._observer.fetched(report)
            return report
        except TimeoutError:
            outcome = "timeout"
        except _Ended as ended:
            outcome = ended.outcome
        except SourceLost as error:
            logger.warning("A prefix could not be fetched from worker %s: %s", source.worker, error)
            outcome = "source_lost"
        except Exception:  # a bug; the request must not be held for ever
            logger.exception("A prefix from worker %s could not be imported.", source.worker)
        seconds = time.monotonic() - begin_s
        report = FetchReport(source=source.worker, place=source.place, outcome=outcome, seconds=seconds)
        self._observer.fetched(report)
        if request_id is not None:
            self._ended(request_id, report)
        return report

    def _ended(self, request_id: str, report: FetchReport) -> None:
        """Call `on_end`, once for a request; any thread may call this, and a fetch may end here and by its time limit at once."""
        with contextlib.suppress(KeyError):
            if request_id:
                self._held.remove(request_id)
            self._on_end(request_id, report)

    async def _fetch(self, request: Request, source: PrefixSource) -> FetchReport:
        """Bring the blocks of the prefix that are missing here.

        Raises:
            _Ended: there is nothing to import, or no room for it.  SourceLost: the source was lost.
        """
        request_id, begin_s = request.request_id, time.monotonic()
        own = await self._on_engine(lambda: self._asked(request_id, source, begin_s))
        if own is None:
            raise _Ended("cancelled")
        if request_id not in self._held:
            raise _Ended("present")
        turn, early = (self._turn(source.worker, own.query.chain[-1], is_early=one) for one in (False, True))
        must_look_again = turn.locked() or early.locked()  # the holder may bring the prefix
        self._waiting[request_id] = own
        try:
            async with turn:
                async with early:
                    pass
                if must_look_again and request_id in self._held:
                    await self._on_engine(lambda: self._let_go([own]))
                if request_id not in self._held:
                    raise _Ended("present")
                return await self._ask_and_import(request_id, request.sharer, source, own.query)
        finally:
            if self._waiting.get(request_id) is own:
                del self._waiting[request_id]

    def _turn(self, source: str, last: bytes, *, is_early: bool) -> asyncio.Lock:
        key = source, last, is_early
        return self._turns.get(key) or self._turns.setdefault(key, asyncio.Lock())

    def _asked(self, request_id: str, source: PrefixSource, begin_s: float) -> _Waiting | None:
        """Let a request go if its prefix is here already. Return what it waits for; None if it has ended. Runs on the engine's
        thread."""
        query = self._store.query(request_id, source.num_tokens)
        if query is None:
            return None
        own = _Waiting(request_id, source, query, begin_s)
        self._let_go([own])
        return own

    def _let_go(self, waiting: Iterable[_Waiting]) -> None:
        """End the fetches whose prefix is here now. Runs on the engine's thread, so that the next step has their requests."""
        for request_id, source, query, begin_s in waiting:
            if request_id in self._held and self._store.has(request_id, query):
                seconds = time.monotonic() - begin_s
                report = FetchReport(source=source.worker, place=source.place, outcome="present", seconds=seconds)
                self._ended(request_id, report)

    async def _ask_and_import(
        self, request_id: str | None, sharer: Sharer, source: PrefixSource, query: PrefixQuery
    ) -> FetchReport:
        """Ask the source for an offer, and do `_import`."""
        asked_s = time.clock_gettime(LEASE_CLOCK)
        query = replace(query, verifies_all=self._config.verify == "all")
        offer = await self.calls.ask(source.worker, self._peers.open_export(source.worker, query))
        if not isinstance(offer, PrefixOffer):
            raise _Ended("refused" if offer == "refused" else "not_found")
        return await self._import(request_id, sharer, source, query, offer, asked_s)

    async def _import(
        self,
        request_id: str | None,
        sharer: Sharer,
        source: PrefixSource,
        query: PrefixQuery,
        offer: PrefixOffer,
        asked_s: float | None = None,
    ) -> FetchReport:
        """Bring all pieces of an offer that are missing here, publish them unless they are a probe (`request_id` is None), and have
        the export closed. The source was asked for the offer at `asked_s`, by `LEASE_CLOCK`; None: it has made it unasked. Raises
        what `_fetch` does."""
        begin_s = time.clock_gettime(LEASE_CLOCK) if asked_s is None else asked_s
        import_id, is_over, is_complete, read_bytes = uuid4().hex, False, False, 0
        task = asyncio.current_task()

        def end(report: FetchReport) -> FetchReport:
            nonlocal is_complete
            report = replace(report, seconds=time.clock_gettime(LEASE_CLOCK) - begin_s)
            if request_id is not None:
                if is_over:
                    raise KeyError(import_id)  # given up while this waited for the engine
                last = query.chain[offer.num_hash_blocks - 1]
                waiting = [one for one in list(self._waiting.values()) if one.query.chain[-1] == last]
                is_awaited = asked_s is None and last == query.chain[-1] and not waiting
                self._store.publish_import(
                    import_id, [request_id, *(one.request_id for one in waiting)], is_awaited=is_awaited
                )
                is_complete = True
                if request_id and task is not None:
                    self._reporting.add(task)
                self._ended(request_id, report)
                self._let_go(waiting)
            return report

        try:
            if request_id and request_id not in self._held:
                raise _Ended("present")  # an early fetch has brought it
            plan = await self._on_engine(lambda: self._store.begin_import(import_id, query, offer))
            if not isinstance(plan, ImportPlan):
                raise _Ended(plan)
            while await self._on_engine(lambda: self._store.awaits_copies(import_id)):
                await asyncio.sleep(LOOK_S)
            report = _report(source, plan)
            if offer.memories and self.memory_wire.is_asked(source.worker):
                read_s = await self.memory_wire.bring(sharer, source.worker, offer, import_id, plan, asked_s)
                report, read_bytes = replace(report, wire=self.memory_wire.name), report.num_bytes
            else:
                read_s = await self.calls.bring(sharer, source.worker, offer, import_id, plan)
            report = replace(report, read_s=read_s)
            if asked_s is None:
                close = self._peers.close_export(source.worker, offer.export_id, read_bytes)
                if not await self.calls.ask(source.worker, close):
                    raise SourceLost("its lease has ended while they were read")
            return await self._on_engine(lambda: end(report))
        finally:
            is_over = True
            if asked_s is not None or not is_complete:
                ends = self._end(source.worker, offer.export_id, None if is_complete else import_id, read_bytes)
                closing = asyncio.create_task(ends)
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    async def _end(self, source: str, export_id: str, import_id: str | None, read_bytes: int) -> None:
        """Free an import that is not complete, once nothing is read into it; then tell the source to end its export. The engine
        ignores an import that never began or has ended. If the message is lost, the export ends when its lease expires."""
        try:
            while import_id is not None and not await self._on_engine(lambda: self._store.drop_import(import_id)):
                await asyncio.sleep(DROP_AGAIN_S)
            async with asyncio.timeout(self._config.timeout_s):
                await self._peers.close_export(source, export_id, read_bytes)
        except Exception as error:
            logger.info("Worker %s could not be told that a transfer has ended: %r", source, error)


def _report(source: PrefixSource, plan: ImportPlan) -> FetchReport:
    """Return the report of a fetch that brings a plan's blocks by calls."""
    return FetchReport(
        source=source.worker,
        place=source.place,
        outcome="fetched",
        num_tokens=plan.num_tokens,
        num_blocks=plan.num_blocks,
        num_bytes=sum(num_bytes for _, num_bytes in plan.pieces),
        full_length_bytes=plan.full_length_bytes,
        on_device=plan.on_device,
        wire=CallWire.name,
    )
