"""How the blocks of an import come from their source. A *wire* brings all of them, or raises:

    CallWire      the source's engine reads the bytes between two steps and returns them from a call, piece by piece (through Ray);
                  the target converts them and writes them into its blocks
    MemoryWire    the target's ranks read the memory of the source's ranks (by NIXL), beside the steps of both

The export of the source keeps the blocks as they are while a wire reads them. Both take turns at one budget of bytes.

A source is *away* on a wire after an error there, or after a wait for half of a fetch's time that was given up. Of the requests
that want its prefixes, one in each `AWAY_S` tries whether it answers again. The others do without this wire: if calls go
unanswered, they compute; if only reads fail, the source's blocks come by calls.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

from transom_core.client_queue import NO_CLIENT, ClientQueue, Sharer
from transom_core.config import TransferConfig
from transom_core.contract.kv_transfer import BlockRange, PrefixOffer
from transom_core.contract.prefix_peers import PrefixPeers
from transom_worker.engine.transfer.store import RANKS_LOST, ImportPlan, OnEngine, TransferStore


class SourceLost(Exception):
    """A call to the source failed, its memory could not be read, or it does not keep its offer."""


class _Wanted(NamedTuple):
    """Bytes that a caller waits for; `turn` is done when it has them."""

    sharer: Sharer
    num_bytes: int
    turn: asyncio.Future[None]


class ByteBudget:
    """Bounds how many bytes a worker's fetches have in flight at once, on all wires together.

    Clients take turns by bytes. A caller that asks for more than the limit takes the whole limit: it waits until no other caller
    holds any bytes, and its client is charged for all that it asked for.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: ClientQueue[_Wanted] = ClientQueue()
        self.used_bytes = 0

    async def take(self, num_bytes: int, sharer: Sharer = NO_CLIENT) -> Callable[[], None]:
        """Wait for `num_bytes` of the budget, and return a function that gives them back."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        wanted = _Wanted(sharer, num_bytes, turn)
        self._waiting.add(sharer.client, wanted)
        self._admit()
        try:
            await turn
        except BaseException:
            self._waiting.remove(sharer.client, wanted)
            if turn.cancelled():
                self._admit()
            else:  # the bytes were granted, but the caller was cancelled right after
                self._give_back(num_bytes)
            raise
        return partial(self._give_back, num_bytes)

    def _give_back(self, num_bytes: int) -> None:
        self.used_bytes -= min(num_bytes, self._limit_bytes)
        self._admit()

    def _admit(self) -> None:
        """Grant bytes to the callers that wait, by turns, until the first one that does not fit."""
        while (wanted := self._waiting.first) is not None:
            if wanted.turn.cancelled():  # its caller removes it in `take` and calls `_admit` again
                return
            held_bytes = min(wanted.num_bytes, self._limit_bytes)
            if self.used_bytes + held_bytes > self._limit_bytes:
                return
            self._waiting.take()
            self._waiting.charge(wanted.sharer.client, wanted.num_bytes / wanted.sharer.weight)
            self.used_bytes += held_bytes
            wanted.turn.set_result(None)


AWAY_S = 30.0
FORGOTTEN_S = 3600.0  # a source that no request has named for this time, since its worker is gone


class AwaySources:
    """The sources that are away on one wire. `timeout_s` is the longest time of a fetch."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.until_s: dict[str, float] = {}  # source -> when it is tried again

    @contextlib.contextmanager
    def noted(self, source: str) -> Iterator[None]:
        """Note whether the source answers what the context waits for."""
        begin_s = time.monotonic()
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception) or time.monotonic() - begin_s >= self._timeout_s / 2:
                self.until_s[source] = time.monotonic() + AWAY_S
            raise
        self.until_s.pop(source, None)

    def is_asked(self, source: str) -> bool:
        """Return whether a request should ask a source. While the source is away, that is one request each `AWAY_S`."""
        until_s, now_s = self.until_s.get(source), time.monotonic()
        if until_s is None:
            return True
        if now_s >= until_s:
            self.until_s = {one: at for one, at in self.until_s.items() if now_s < at + FORGOTTEN_S}
            self.until_s[source] = now_s + AWAY_S
        return now_s >= until_s


LOOK_S = 2e-3  # 8 MiB take 2 ms on one host
LEASE_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while this host is suspended

T = TypeVar("T")


class CallWire:
    """Brings blocks as results of calls to the source, several pieces at once. Runs on the worker's event loop."""

    name = "ray"

    def __init__(self, peers: PrefixPeers, store: TransferStore, on_engine: OnEngine, config: TransferConfig) -> None:
        self.peers, self.store, self.on_engine = peers, store, on_engine
        self.budget = ByteBudget(config.max_bytes_in_flight)
        self.away = AwaySources(config.timeout_s)

    async def bring(self, sharer: Sharer, source: str, offer: PrefixOffer, import_id: str, plan: ImportPlan) -> float:
        """Read, convert and write all pieces; then they may be published. The first error cancels the others. Return the seconds,
        waits for steps and for other fetches included.

        Raises:
            SourceLost: the source was lost, or does not keep its offer.  KeyError: the import has ended.
        """
        begin_s = time.monotonic()
        await all_of([self._bring(sharer, source, offer, import_id, *piece) for piece in plan.pieces])
        return time.monotonic() - begin_s

    async def ask(self, source: str, call: Awaitable[T]) -> T:
        """Wait for a call to a source. Raises SourceLost if it fails."""
        try:
            with self.away.noted(source):
                return await call
        except Exception as error:
            raise SourceLost(repr(error)) from error

    async def _bring(
        self, sharer: Sharer, source: str, offer: PrefixOffer, import_id: str, blocks: BlockRange, num_bytes: int
    ) -> None:
        give_back = await self.budget.take(num_bytes, sharer)
        try:
            data = await self.ask(source, self.peers.read_export(source, offer.export_id, blocks))
            converted = await asyncio.to_thread(self.store.convert, offer, blocks, data)
            await self.on_engine(lambda: self.store.write_import(import_id, blocks, converted))
        finally:
            give_back()


class MemoryWire:
    """Lets the ranks read the blocks out of the memory of the source's ranks, and compare some of them with digests in the offer.

    A read that ends before the source's lease can have ended has read blocks that were there all the time. The lease begins after
    this worker has asked for the export, so this worker's clock decides, and no call to the source. Where the offer came unasked,
    the caller must ask the source.
    """

    name = "nixl"

    def __init__(self, calls: CallWire, config: TransferConfig) -> None:
        self._calls, self._store, self._on_engine = calls, calls.store, calls.on_engine
        self._away = AwaySources(config.timeout_s)
        self._abandoned: Counter[str] = Counter()  # by source: reads that were given up and are not over

    def is_asked(self, source: str) -> bool:
        """Return whether the next blocks of a source should come by this wire. Not while a read that was given up may still bring
        bytes: so a source that hangs keeps a bounded share of the budget and of the blocks here."""
        return not self._abandoned[source] and self._away.is_asked(source)

    async def bring(
        self, sharer: Sharer, source: str, offer: PrefixOffer, import_id: str, plan: ImportPlan, asked_s: float | None
    ) -> float:
        """Read all blocks at once; return the seconds of the reads alone. `asked_s` is when this worker asked for the export, by
        `LEASE_CLOCK`; None: it came unasked. Raises the errors of `CallWire.bring`."""
        num_bytes = sum(num_bytes for _, num_bytes in plan.pieces)
        ended: asyncio.Future[tuple[str, float]] = asyncio.get_running_loop().create_future()
        give_back = await self._calls.budget.take(num_bytes, sharer)
        ended.add_done_callback(lambda _: give_back())
        try:
            await self._begin(offer, import_id, ended)
            with self._away.noted(source):
                await self._until_over(ended)
                error, seconds = ended.result()
                if error not in ("", RANKS_LOST):
                    raise SourceLost(f"its memory could not be read: {error}")
                if asked_s is not None and time.clock_gettime(LEASE_CLOCK) - asked_s >= offer.lease_s:
                    raise SourceLost("its lease may have ended while they were read")
            if error:
                raise KeyError(import_id)  # the ranks start again, and the cache was emptied
            return seconds
        finally:
            if not ended.done():
                self._abandoned[source] += 1
                ended.add_done_callback(lambda _: self._abandoned.subtract([source]))

    async def _begin(self, offer: PrefixOffer, import_id: str, ended: asyncio.Future[tuple[str, float]]) -> None:
        """Let the ranks read. `ended` gets the result, even if this is cancelled. Raises what `begin_read` does."""
        loop = asyncio.get_running_loop()

        def end(error: str, seconds: float) -> None:
            if not ended.done():
                ended.set_result((error, seconds))

        def on_end(error: str, seconds: float) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(end, error, seconds)

        begun = asyncio.ensure_future(self._on_engine(lambda: self._store.begin_read(import_id, offer, on_end)))
        begun.add_done_callback(lambda done: None if done.exception() is None else end(repr(done.exception()), 0.0))
        await asyncio.shield(begun)

    async def _until_over(self, ended: asyncio.Future[Any]) -> None:
        while not ended.done():
            await asyncio.wait([ended], timeout=LOOK_S)
            # Ranks in processes of their own report when the engine listens, which it does in a step anyway.
            look = asyncio.ensure_future(self._on_engine(self._store.take_read_ends))
            # if the ranks end, so does the read
            look.add_done_callback(lambda done: done.cancelled() or done.exception())
            waits: list[asyncio.Future[Any]] = [ended, look]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)


async def all_of(steps: list[Awaitable[None]]) -> None:
    """Run all steps concurrently; the first error cancels the others."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
