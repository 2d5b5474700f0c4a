"""`PrefixExports`: the source's side of KV transfer, which lends the live blocks of a prefix to other workers while they read them.

- **export**: the referenced blocks of one prefix. They cannot be evicted before the export ends.
- **lease**: an export ends if its target calls nothing for `TransferConfig.timeout_s`, because the target or its connection was
  lost.

The target calls `open`, `read` for each piece unless its ranks read the memory, then `close`; of a prompt that is computed here for
it, `handovers` calls `open_early`. All methods run on the worker's event loop; they touch the cache on the engine's thread, between
two steps.
"""

import asyncio
import logging
from dataclasses import replace
from uuid import uuid4

import numpy as np

from transom_core.config import TransferConfig
from transom_core.contract.kv_transfer import BlockRange, PrefixOffer, PrefixQuery
from transom_core.contract.prefix_peers import Bytes
from transom_worker.engine.transfer.store import OnEngine, TransferStore
from transom_worker.telemetry.transfer_report import TransferObserver

logger = logging.getLogger("transom.worker")

MAX_EXPORTS = 64
"""The most exports that are open at once; more are refused. Blocks of exports cannot be evicted, so they must not fill the whole
cache."""


class PrefixExports:
    """The open exports of one worker."""

    def __init__(
        self, store: TransferStore, on_engine: OnEngine, config: TransferConfig, observer: TransferObserver
    ) -> None:
        self._store, self._on_engine, self._observer = store, on_engine, observer
        self._lease_s = config.timeout_s
        # Export id -> the timer of its lease; None: it is being opened.
        self._leases: dict[str, asyncio.TimerHandle | None] = {}

    def __len__(self) -> int:
        return len(self._leases)

    async def open(self, query: PrefixQuery) -> PrefixOffer | str:
        """Reference the query's longest prefix that is cached here, and return an offer of it; else "refused" or "not_found"."""
        if len(self._leases) >= MAX_EXPORTS:
            self._observer.exported("refused")
            return "refused"
        export_id = uuid4().hex
        self._leases[export_id] = None
        offer = None
        try:
            offer = await self._on_engine(lambda: self._store.open_export(export_id, query))
        except ValueError as error:
            logger.warning("Another worker asks for a prefix that is not of this model's cache: %s", error)
            self._observer.exported("refused")
            return "refused"
        finally:
            if offer is None:
                self._end(export_id)
        if offer is None:
            self._observer.exported("not_found")
            return "not_found"
        self._renew(export_id)
        return replace(offer, lease_s=self._lease_s)

    async def open_early(
        self, request_id: str, query: PrefixQuery, *, more_than: int, num_held: int
    ) -> PrefixOffer | None:
        """Return an offer of what is cached here of a request's prompt, without the `num_held` hash blocks that the target has, if
        that is `more_than` so many hash blocks and another export may be opened."""
        if len(self._leases) >= MAX_EXPORTS:
            return None
        export_id, open_early = uuid4().hex, self._store.open_early
        try:
            offer = await self._on_engine(
                lambda: open_early(export_id, request_id, query, more_than=more_than, num_held=num_held)
            )
        except BaseException:
            self._on_engine(lambda: self._store.close_export(export_id))
            raise
        if offer is None:
            return None
        if len(self._leases) >= MAX_EXPORTS:
            self._on_engine(lambda: self._store.close_export(export_id))
            return None
        self._leases[export_id] = None
        self._renew(export_id)
        return replace(offer, lease_s=self._lease_s)

    async def read(self, export_id: str, blocks: BlockRange) -> list[Bytes]:
        """Return the bytes of some blocks of an open export, for each rank.

        Raises:
            KeyError: the export has ended.
        """
        self._renew(export_id)
        data = await self._on_engine(lambda: self._store.read_export(export_id, blocks))
        # As numpy arrays, because Ray sends these without copying them into its messages.
        pieces = [np.frombuffer(part, np.uint8) for part in data]
        if export_id in self._leases:  # the lease may have expired, or the export was closed, while the engine read
            self._renew(export_id)
        self._observer.sent(sum(piece.nbytes for piece in pieces))
        return pieces

    def close(self, export_id: str, read_bytes: int = 0) -> bool:
        """End an export whose target has read everything or gives up; return whether it was open. `read_bytes` of its blocks were
        read out of the ranks' memory, and not by `read`."""
        if export_id not in self._leases:
            return False
        if read_bytes:
            self._observer.sent(read_bytes)
        self._observer.exported("read")
        self._end(export_id)
        return True

    def _renew(self, export_id: str) -> None:
        """Let an export's lease begin again. Raises KeyError: the export has ended."""
        lease = self._leases[export_id]
        if lease is not None:
            lease.cancel()
        self._leases[export_id] = asyncio.get_running_loop().call_later(self._lease_s, self._expire, export_id)

    def _expire(self, export_id: str) -> None:
        self._observer.exported("expired")
        self._end(export_id)

    def _end(self, export_id: str) -> None:
        """End the lease and release the export's blocks. The engine runs calls in order, so it releases after all earlier reads."""
        lease = self._leases.pop(export_id)
        if lease is not None:
            lease.cancel()
        self._on_engine(lambda: self._store.close_export(export_id))
