"""`KvTransfer`: both sides of KV transfer at one worker: its exports to other workers, and its fetches from them."""

from __future__ import annotations

from collections.abc import Sequence

from transom_core.config import TransferConfig
from transom_core.contract import Request
from transom_core.contract.prefix_peers import PrefixPeers
from transom_worker.kvcache.tiers.transfer.fetches import OnEnd, PrefixFetches
from transom_worker.kvcache.tiers.transfer.kv_store import KvStore, OnEngine
from transom_worker.kvcache.tiers.transfer.served_exports import PrefixExports
from transom_worker.kvcache.tiers.transfer.transfer_report import TransferObserver


class KvTransfer:
    """Runs on the worker's event loop. `fetches` is None if the worker has no host tier, or knows no other workers."""

    def __init__(
        self,
        store: KvStore,
        on_engine: OnEngine,
        config: TransferConfig,
        *,
        peers: PrefixPeers | None,
        on_end: OnEnd,
        observer: TransferObserver,
    ) -> None:
        self.exports = PrefixExports(store, on_engine, config, observer)
        self.fetches: PrefixFetches | None = None
        if config.is_on and peers is not None:
            self.fetches = PrefixFetches(peers, store, on_engine, config, on_end=on_end, observer=observer)

    @property
    def is_on(self) -> bool:
        """Whether this worker fetches prefixes."""
        return self.fetches is not None

    def fetched_by(self, requests: Sequence[Request], own_id: str) -> dict[str, Request]:
        """Return the requests, by id, whose prefix this worker is to fetch from another worker."""
        if self.fetches is None:
            return {}
        sources = ((one, one.prefix_source) for one in requests)
        return {one.request_id: one for one, source in sources if source is not None and source.worker != own_id}

    def start(self, request: Request) -> None:
        """Begin to fetch the prefix of a held request."""
        assert self.fetches is not None
        self.fetches.start(request)

    def cancel(self, request_id: str) -> None:
        """End the fetch of a request that has ended, if there is one."""
        if self.fetches is not None:
            self.fetches.cancel(request_id)
