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
`TransferConfig.timeout_s` at the latest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar
from uuid import uuid4
from weakref import WeakValueDictionary

from transom_core.config import TransferConfig
from transom_core.contract import PrefixSource, Request
from transom_core.contract.kv_transfer import BlockRange, PrefixOffer, PrefixQuery
from transom_core.contract.prefix_peers import PrefixPeers
from transom_worker.kvcache.tiers.transfer.kv_store import ImportPlan, KvStore, OnEngine
from transom_worker.kvcache.tiers.transfer.transfer_report import FetchOutcome, FetchReport, TransferObserver

logger = logging.getLogger("transom.worker")

T = TypeVar("T")
OnEnd = Callable[[str, FetchReport], None]
"""Called with a request's id when its fetch has ended, exactly once unless the request was cancelled."""


class ByteBudget:
    """Bounds how many bytes a worker's fetches have in flight at once.

    Callers get bytes in the order in which they asked. A caller that asks for more than the limit counts as asking for the whole
    limit: it waits until no other caller holds any bytes.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.used_bytes = 0

    @contextlib.asynccontextmanager
    async def taken(self, num_bytes: int) -> AsyncIterator[None]:
        """Hold `num_bytes` of the budget while the context is open."""
        num_bytes = min(num_bytes, self._limit_bytes)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            # The bytes were granted, even if the caller was cancelled right after.
            if turn.done() and not turn.cancelled():
                self.used_bytes -= num_bytes
            else:
                self._waiting.remove((num_bytes, turn))
            self._admit()

    def _admit(self) -> None:
        """Grant bytes to the callers that wait, in order, until the first one that does not fit."""
        while self._waiting:
            num_bytes, turn = self._waiting[0]
            if turn.cancelled():  # its caller removes it in `taken` and calls `_admit` again
                return
            if self.used_bytes + num_bytes > self._limit_bytes:
                return
            self._waiting.popleft()
            self.used_bytes += num_bytes
            turn.set_result(None)


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
        self._closing: set[asyncio.Task[None]] = set()
        # (source, last digest of the prefix) -> a lock, so that requests fetch the same prefix one after another. An entry vanishes
        # when no fetch uses its lock any more.
        self._turns: WeakValueDictionary[tuple[str, bytes], asyncio.Lock] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._tasks)

    def wanted_by(self, requests: Sequence[Request], own_id: str) -> dict[str, Request]:
        """Return, by id, the requests for which the router has named another worker as the source of their prefix."""
        sources = ((one, one.prefix_source) for one in requests)
        return {one.request_id: one for one, source in sources if source is not None and source.worker != own_id}

    def start(self, request: Request) -> None:
        """Begin to fetch the prefix of a held request; `on_end` is called at the end."""
        assert request.prefix_source is not None
        request_id, limit_s = request.request_id, self._config.timeout_s
        if request.time_left_s is not None:
            limit_s = min(limit_s, request.time_left_s)
        task = asyncio.create_task(self._run(request_id, request.prefix_source, limit_s))
        self._tasks[request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request_id, None))

    def cancel(self, request_id: str) -> None:
        """End the fetch of a request that has ended, without calling `on_end`. Ids without a fetch are ignored."""
        if (task := self._tasks.pop(request_id, None)) is not None:
            task.cancel()

    async def _run(self, request_id: str, source: PrefixSource, limit_s: float) -> None:
        """Fetch a prefix, and report the outcome. However `_fetch` ends, both sides release their blocks.

        A cancelled fetch reports nothing: `CancelledError` passes through.
        """
        begin_s = time.monotonic()
        plan: ImportPlan | None = None
        outcome: FetchOutcome = "failed"
        try:
            async with asyncio.timeout(limit_s):
                plan = await self._fetch(request_id, source)
            outcome = "fetched"
        except TimeoutError:
            outcome = "timeout"
        except _Ended as ended:
            outcome = ended.outcome
        except Exception:  # a bug; the request must not be held for ever
            logger.exception("A prefix from worker %s could not be imported.", source.worker)
        report = _report(source.worker, outcome, plan, seconds=time.monotonic() - begin_s)
        self._observer.fetched(report)
        self._on_end(request_id, report)

    async def _fetch(self, request_id: str, source: PrefixSource) -> ImportPlan:
        """Bring the blocks of the prefix that are missing here.

        Raises:
            _Ended: there is nothing to import, no room for it, or the source was lost.
        """
        query = await self._on_engine(lambda: self._store.query(request_id, source.num_tokens))
        if query is None:
            raise _Ended("cancelled")
        key = source.worker, query.chain[-1]
        turn = self._turns.get(key) or self._turns.setdefault(key, asyncio.Lock())
        async with turn:
            # An earlier holder of the lock may have brought the prefix.
            if await self._on_engine(lambda: self._store.has(request_id, query)):
                raise _Ended("present")
            offer = await _of_source(source.worker, self._peers.open_export(source.worker, query))
            if not isinstance(offer, PrefixOffer):
                raise _Ended("refused" if offer == "refused" else "not_found")
            try:
                return await self._import(request_id, source.worker, query, offer)
            finally:
                self._close(source.worker, offer.export_id)

    async def _import(self, request_id: str, source: str, query: PrefixQuery, offer: PrefixOffer) -> ImportPlan:
        """Bring all pieces of an offer that are missing here, and publish them. Raises _Ended, as `_fetch`."""
        import_id, is_complete = uuid4().hex, False
        try:
            plan = await self._on_engine(lambda: self._store.begin_import(import_id, query, offer))
            if plan is None:
                raise _Ended("no_space")
            await _all([self._bring(source, offer, import_id, *piece) for piece in plan.pieces])
            await self._on_engine(lambda: self._store.publish_import(import_id, request_id))
            is_complete = True
            return plan
        finally:
            if not is_complete:  # the engine ignores this if the import never began, or has ended
                self._on_engine(lambda: self._store.drop_import(import_id))

    async def _bring(self, source: str, offer: PrefixOffer, import_id: str, blocks: BlockRange, num_bytes: int) -> None:
        """Read, convert and write one piece."""
        async with self._budget.taken(num_bytes):
            data = await _of_source(source, self._peers.read_export(source, offer.export_id, blocks))
            converted = await asyncio.to_thread(self._store.convert, offer, blocks, data)
            await self._on_engine(lambda: self._store.write_import(import_id, blocks, converted))

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


async def _of_source(source: str, call: Awaitable[T]) -> T:
    """Wait for a call to the source. Raises `_Ended` if it fails."""
    try:
        return await call
    except Exception as error:
        logger.warning("A prefix could not be fetched from worker %s: %r", source, error)
        raise _Ended("source_lost") from error


async def _all(steps: list[Awaitable[None]]) -> None:
    """Run all steps concurrently; the first error cancels the others."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
