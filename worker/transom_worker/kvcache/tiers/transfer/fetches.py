"""`PrefixFetches`: the target's side of KV transfer, which brings a held request's prefix from another worker into the host tier.

- **held request**: a request that the engine does not admit before its fetch has ended, with or without success.
- **piece**: some blocks of one group that are read, converted and written together (`contract.kv_transfer.MAX_PIECE_BYTES`).

One fetch, from a request to its end:

    query     the digests of the prefix                    (`KvStore.query`)
    export    the source lends its blocks, and offers them (`PrefixPeers.open_export`)
    import    host blocks are taken for what is missing    (`KvStore.begin_import`)
    pieces    read, convert and write each, concurrently   (`_bring`)
    publish   only when all pieces have come; close the export, and call `on_end`

Requests that need the same prefix from the same source, such as the choices of one prompt, fetch it one after another, so that all
but the first find it here. A fetch runs on the worker's event loop and touches the cache on the engine's thread. It ends after
`TransferConfig.timeout_s` at the latest. A source that has left a call without an answer is *away*: requests compute its prefixes,
but for one in each `AWAY_S`, which tries whether it answers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar
from uuid import uuid4
from weakref import WeakValueDictionary

from transom_core.client_queue import NO_CLIENT, ClientQueue, Sharer
from transom_core.config import TransferConfig
from transom_core.contract import PrefixSource, Request
from transom_core.contract.kv_transfer import BlockRange, PrefixOffer, PrefixQuery
from transom_core.contract.prefix_peers import PrefixPeers
from transom_worker.kvcache.tiers.transfer.kv_store import ImportPlan, KvStore, OnEngine
from transom_worker.kvcache.tiers.transfer.transfer_report import FetchOutcome, FetchReport, TransferObserver

logger = logging.getLogger("transom.worker")

AWAY_S = 30.0
FORGOTTEN_S = 3600.0  # a source that no request has named for this time, since its worker is gone

T = TypeVar("T")
OnEnd = Callable[[str, FetchReport], None]
"""Called with a request's id when its fetch has ended, exactly once unless the request was cancelled."""


class _Wanted(NamedTuple):
    """Bytes of the budget that a piece waits for; `turn` is done when it has them."""

    sharer: Sharer
    num_bytes: int
    turn: asyncio.Future[None]


class ByteBudget:
    """Bounds how many bytes a worker's fetches have in flight at once.

    Clients take turns by bytes. A caller that asks for more than the limit counts as asking for the whole limit: it waits until no
    other caller holds any bytes.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: ClientQueue[_Wanted] = ClientQueue()
        self.used_bytes = 0

    @contextlib.asynccontextmanager
    async def taken(self, num_bytes: int, sharer: Sharer = NO_CLIENT) -> AsyncIterator[None]:
        """Hold `num_bytes` of the budget while the context is open."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        wanted = _Wanted(sharer, min(num_bytes, self._limit_bytes), turn)
        self._waiting.add(sharer.client, wanted)
        self._admit()
        try:
            await turn
            yield
        finally:
            self._waiting.remove(sharer.client, wanted)
            # The bytes were granted, even if the caller was cancelled right after.
            if turn.done() and not turn.cancelled():
                self.used_bytes -= wanted.num_bytes
            self._admit()

    def _admit(self) -> None:
        """Grant bytes to the callers that wait, by turns, until the first one that does not fit."""
        while (wanted := self._waiting.first) is not None:
            if wanted.turn.cancelled():  # its caller removes it in `taken` and calls `_admit` again
                return
            if self.used_bytes + wanted.num_bytes > self._limit_bytes:
                return
            self._waiting.take()
            self._waiting.charge(wanted.sharer.client, wanted.num_bytes / wanted.sharer.weight)
            self.used_bytes += wanted.num_bytes
            wanted.turn.set_result(None)


class _Ended(Exception):
    """Ends a fetch with an outcome that is not an error of this worker, such as "not_found"."""

    def __init__(self, outcome: FetchOutcome) -> None:
        self.outcome = outcome


class PrefixFetches:
    """The fetches of one worker. All methods run on its event loop."""

    def __init__(
        self,
        peers: PrefixPeers,
        store: KvStore,
        on_engine: OnEngine,
        config: TransferConfig,
        *,
        on_end: OnEnd,
        observer: TransferObserver,
    ) -> None:
        self._peers, self._store, self._on_engine = peers, store, on_engine
        self._config, self._on_end, self._observer = config, on_end, observer
        self._budget = ByteBudget(config.max_bytes_in_flight)
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by request id
        self._away_until_s: dict[str, float] = {}  # source -> when it is tried again, of those that are away
        self._closing: set[asyncio.Task[None]] = set()
        # (source, last digest of the prefix) -> a lock, so that requests fetch the same prefix one after another. An entry vanishes
        # when no fetch uses its lock any more.
        self._turns: WeakValueDictionary[tuple[str, bytes], asyncio.Lock] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._tasks)

    def wanted_by(self, requests: Sequence[Request], own_id: str) -> dict[str, Request]:
        """Return, by id, the requests for which the router has named another worker as the source of their prefix.

        Of a source that is away, one request is returned each `AWAY_S`.
        """
        sources = ((one, one.prefix_source) for one in requests)
        return {
            one.request_id: one
            for one, source in sources
            if source is not None and source.worker != own_id and self._is_asked(source.worker)
        }

    def start(self, request: Request) -> None:
        """Begin to fetch the prefix of a held request; `on_end` is called at the end."""
        assert request.prefix_source is not None
        request_id, limit_s = request.request_id, self._config.timeout_s
        if request.time_left_s is not None:
            limit_s = min(limit_s, request.time_left_s)
        task = asyncio.create_task(self._run(request, request.prefix_source, limit_s))
        self._tasks[request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request_id, None))

    def cancel(self, request_id: str) -> None:
        """End the fetch of a request that has ended, without calling `on_end`. Ids without a fetch are ignored."""
        if (task := self._tasks.pop(request_id, None)) is not None:
            task.cancel()

    async def _run(self, request: Request, source: PrefixSource, limit_s: float) -> None:
        """Fetch a prefix, and report the outcome. However `_fetch` ends, both sides release their blocks.

        A cancelled fetch reports nothing: `CancelledError` passes through.
        """
        begin_s = time.monotonic()
        plan: ImportPlan | None = None
        outcome: FetchOutcome = "failed"
        try:
            async with asyncio.timeout(limit_s):
                plan = await self._fetch(request, source)
            outcome = "fetched"
        except TimeoutError:
            outcome = "timeout"
        except _Ended as ended:
            outcome = ended.outcome
        except Exception:  # a bug; the request must not be held for ever
            logger.exception("A prefix from worker %s could not be imported.", source.worker)
        report = _report(source.worker, outcome, plan, seconds=time.monotonic() - begin_s)
        self._observer.fetched(report)
        self._on_end(request.request_id, report)

    async def _fetch(self, request: Request, source: PrefixSource) -> ImportPlan:
        """Bring the blocks of the prefix that are missing here.

        Raises:
            _Ended: there is nothing to import, no room for it, or the source was lost.
        """
        query = await self._on_engine(lambda: self._store.query(request.request_id, source.num_tokens))
        if query is None:
            raise _Ended("cancelled")
        key = source.worker, query.chain[-1]
        turn = self._turns.get(key) or self._turns.setdefault(key, asyncio.Lock())
        async with turn:
            # An earlier holder of the lock may have brought the prefix.
            if await self._on_engine(lambda: self._store.has(request.request_id, query)):
                raise _Ended("present")
            offer = await self._ask(source.worker, self._peers.open_export(source.worker, query))
            if not isinstance(offer, PrefixOffer):
                raise _Ended("refused" if offer == "refused" else "not_found")
            try:
                return await self._import(request, source.worker, query, offer)
            finally:
                self._close(source.worker, offer.export_id)

    async def _import(self, request: Request, source: str, query: PrefixQuery, offer: PrefixOffer) -> ImportPlan:
        """Bring all pieces of an offer that are missing here, and publish them. Raises _Ended, as `_fetch`."""
        import_id, is_complete = uuid4().hex, False
        try:
            plan = await self._on_engine(lambda: self._store.begin_import(import_id, query, offer))
            if plan is None:
                raise _Ended("no_space")
            await _all([self._bring(request.sharer, source, offer, import_id, *piece) for piece in plan.pieces])
            await self._on_engine(lambda: self._store.publish_import(import_id, request.request_id))
            is_complete = True
            return plan
        finally:
            if not is_complete:  # the engine ignores this if the import never began, or has ended
                self._on_engine(lambda: self._store.drop_import(import_id))

    async def _bring(
        self, sharer: Sharer, source: str, offer: PrefixOffer, import_id: str, blocks: BlockRange, num_bytes: int
    ) -> None:
        """Read, convert and write one piece."""
        async with self._budget.taken(num_bytes, sharer):
            data = await self._ask(source, self._peers.read_export(source, offer.export_id, blocks))
            converted = await asyncio.to_thread(self._store.convert, offer, blocks, data)
            await self._on_engine(lambda: self._store.write_import(import_id, blocks, converted))

    async def _ask(self, source: str, call: Awaitable[T]) -> T:
        """Wait for a call to a source. If it fails, or is given up after half of a fetch's time, the source is away.

        Raises:
            _Ended: the call failed.
        """
        begin_s = time.monotonic()
        try:
            answer = await call
        except asyncio.CancelledError:
            if time.monotonic() - begin_s >= self._config.timeout_s / 2:
                self._away_until_s[source] = time.monotonic() + AWAY_S
            raise
        except Exception as error:
            logger.warning("A prefix could not be fetched from worker %s: %r", source, error)
            self._away_until_s[source] = time.monotonic() + AWAY_S
            raise _Ended("source_lost") from error
        self._away_until_s.pop(source, None)
        return answer

    def _is_asked(self, source: str) -> bool:
        """Return whether a request should ask a source. While the source is away, that is one request each `AWAY_S`."""
        until_s, now_s = self._away_until_s.get(source), time.monotonic()
        if until_s is None:
            return True
        if now_s >= until_s:
            self._away_until_s = {one: at for one, at in self._away_until_s.items() if now_s < at + FORGOTTEN_S}
            self._away_until_s[source] = now_s + AWAY_S
        return now_s >= until_s

    def _close(self, source: str, export_id: str) -> None:
        """Tell the source to end its export. If the message is lost, the export ends when its lease expires."""
        task = asyncio.create_task(self._send_close(source, export_id))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _send_close(self, source: str, export_id: str) -> None:
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await self._peers.close_export(source, export_id)
        except Exception as error:
            logger.info("Worker %s could not be told that a transfer has ended: %r", source, error)


def _report(source: str, outcome: FetchOutcome, plan: ImportPlan | None, *, seconds: float) -> FetchReport:
    if plan is None:
        return FetchReport(source=source, outcome=outcome, seconds=seconds)
    return FetchReport(
        source=source,
        outcome=outcome,
        num_tokens=plan.num_tokens,
        num_blocks=plan.num_blocks,
        num_bytes=sum(num_bytes for _, num_bytes in plan.pieces),
        full_length_bytes=plan.full_length_bytes,
        seconds=seconds,
    )


async def _all(steps: list[Awaitable[None]]) -> None:
    """Run all steps concurrently; the first error cancels the others."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
