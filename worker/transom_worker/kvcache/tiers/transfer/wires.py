"""How the blocks of an import come from their source. A *wire* brings all of them, or raises:

    CallWire      the source's engine reads the bytes between two steps and returns them from a call, piece by piece (through Ray);
                  the target converts them and writes them into its host tier
    MemoryWire    the target's ranks read the memory of the source's ranks (by NIXL), beside the steps of both

The export of the source keeps the blocks as they are while a wire reads them. Both take turns at one budget of bytes.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable
from typing import TypeVar

from transom_core.client_queue import Sharer
from transom_core.config import TransferConfig
from transom_core.contract.kv_transfer import BlockRange, PrefixOffer
from transom_core.contract.prefix_peers import PrefixPeers
from transom_worker.kvcache.tiers.transfer.away_sources import AwaySources
from transom_worker.kvcache.tiers.transfer.byte_budget import ByteBudget
from transom_worker.kvcache.tiers.transfer.kv_store import ImportPlan, KvStore, OnEngine, SourceLost

logger = logging.getLogger("transom.worker")

FIRST_LOOK_S = 1e-3  # 4 MiB take 1 ms on one host
LAST_LOOK_S = 0.02

T = TypeVar("T")


class CallWire:
    """Brings blocks as results of calls to the source, several pieces at once. Runs on the worker's event loop."""

    name = "ray"

    def __init__(self, peers: PrefixPeers, store: KvStore, on_engine: OnEngine, config: TransferConfig) -> None:
        self.peers, self.store, self.on_engine = peers, store, on_engine
        self.budget = ByteBudget(config.max_bytes_in_flight)
        self.away = AwaySources(config.timeout_s)

    async def bring(self, sharer: Sharer, source: str, offer: PrefixOffer, import_id: str, plan: ImportPlan) -> None:
        """Read, convert and write all pieces; then they may be published. The first error cancels the others.

        Raises:
            SourceLost: the source was lost, or does not keep its offer.  KeyError: the import has ended.
        """
        await all_of([self._bring(sharer, source, offer, import_id, *piece) for piece in plan.pieces])

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
        async with self.budget.taken(num_bytes, sharer):
            data = await self.ask(source, self.peers.read_export(source, offer.export_id, blocks))
            converted = await asyncio.to_thread(self.store.convert, offer, blocks, data)
            await self.on_engine(lambda: self.store.write_import(import_id, blocks, converted))


class MemoryWire:
    """Lets the ranks read the blocks out of the memory of the source's ranks, and compares some of them with the source's, which it
    gets by `calls`.

    The comparison comes last: the source answers it only while the export is open, so the blocks were there all the time.
    """

    name = "nixl"

    def __init__(self, calls: CallWire, config: TransferConfig) -> None:
        self._calls, self._store, self._on_engine = calls, calls.store, calls.on_engine
        self._compares_all = config.verify == "all"
        self.away = AwaySources(config.timeout_s)

    async def bring(self, sharer: Sharer, source: str, offer: PrefixOffer, import_id: str, plan: ImportPlan) -> None:
        """Read all blocks at once, look whether they have come, and compare. Raises the errors of `CallWire.bring`."""
        async with self._calls.budget.taken(sum(num_bytes for _, num_bytes in plan.pieces), sharer):
            with self.away.noted(source):
                await self._read(offer, import_id)
                await all_of([self._compare(source, offer, import_id, blocks) for blocks in self._compared(plan)])

    async def _read(self, offer: PrefixOffer, import_id: str) -> None:
        pause_s = FIRST_LOOK_S
        await self._on_engine(lambda: self._store.begin_read(import_id, offer))
        while await self._on_engine(lambda: self._store.is_reading(import_id)):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_LOOK_S)

    async def _compare(self, source: str, offer: PrefixOffer, import_id: str, blocks: BlockRange) -> None:
        data = await self._calls.ask(source, self._calls.peers.read_export(source, offer.export_id, blocks))
        if not await self._on_engine(lambda: self._store.is_equal(import_id, offer, blocks, data)):
            logger.error("Blocks that NIXL read from worker %s differ from that worker's; they are not used.", source)
            raise SourceLost("blocks came with other bytes")

    def _compared(self, plan: ImportPlan) -> list[BlockRange]:
        """Return the blocks to compare: all, or one of each group, chosen at random."""
        if self._compares_all:
            return [blocks for blocks, _ in plan.pieces]
        by_group: dict[int, list[int]] = {}
        for blocks, _ in plan.pieces:
            by_group.setdefault(blocks.group, []).extend(blocks.blocks)
        return [BlockRange(group, (random.choice(some),)) for group, some in by_group.items()]


async def all_of(steps: list[Awaitable[None]]) -> None:
    """Run all steps concurrently; the first error cancels the others."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
