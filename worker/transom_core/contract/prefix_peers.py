"""`PrefixPeers`: how a worker calls other workers for KV transfer. `transom_cluster.serve` implements it over Ray Serve."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from transom_core.client_queue import Sharer
from transom_core.contract import PrefixSource
from transom_core.contract.kv_transfer import BlockRange, PrefixOffer, PrefixQuery

Bytes = npt.NDArray[np.uint8]


class PrefixPeers(Protocol):
    """The other workers, by the ids by which routers know them. Every method may raise any exception when a worker is lost."""

    async def open_export(self, worker: str, query: PrefixQuery) -> PrefixOffer | str:
        """Ask a worker for a prefix; return its offer, or an `ExportOutcome` that says why it offers nothing."""

    async def own_query(self, worker: str, query: PrefixQuery) -> PrefixQuery | None:
        """Return a query as that worker would ask it early; None if it would not."""

    async def fetch_early(
        self, worker: str, source: PrefixSource, query: PrefixQuery, offer: PrefixOffer, sharer: Sharer
    ) -> bool:
        """Have a worker fetch what `source` offers, and return whether it has that then. It takes turns as the client `sharer`."""

    async def read_export(self, worker: str, export_id: str, blocks: BlockRange) -> list[Bytes]:
        """Return the bytes of some blocks of an export, one after the other: one array for each of the worker's ranks."""

    async def close_export(self, worker: str, export_id: str, read_bytes: int) -> bool:
        """Have the worker release the blocks of an export, of which `read_bytes` were read out of its memory; return whether it
        lent them until now."""
