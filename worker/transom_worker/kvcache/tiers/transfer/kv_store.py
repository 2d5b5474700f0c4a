"""`KvStore`: the interface through which KV transfer uses a worker's own KV cache; `engine.transfer_store` implements it.

The source calls `open_export`, `read_export` for each piece, then `close_export`. The target calls `query`, `has`, `begin_import`,
brings the blocks, then calls `publish_import` or, if a block is missing, `drop_import`. It brings them by `convert` and
`write_import` for each piece, or by `begin_read` (`wires`).

All methods but `convert` run on the engine's thread, between two steps, and must be short. The callers choose the ids of exports
and imports, so that they can end one even if they never learned whether it began: ending an unknown id does nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from transom_core.contract.kv_transfer import BlockRange, PrefixOffer, PrefixQuery
from transom_core.contract.prefix_peers import Bytes

T = TypeVar("T")


class SourceLost(Exception):
    """A call to the source failed, its memory could not be read, or it does not keep its offer."""


RANKS_LOST = "the ranks that read have ended"  # the end of a read that is no fault of its source


class OnEngine(Protocol):
    """Runs functions on the engine's thread, between two steps, in the order of the calls."""

    def __call__(self, function: Callable[[], T]) -> Awaitable[T]:
        """Queue the function, and return an awaitable of its result, which the caller may ignore. A caller that is cancelled does
        not learn whether the function ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportPlan:
    """The blocks of an offer that are missing here; host blocks are allocated for them.

    `pieces` are the block ranges to read, each with its bytes at the source. `num_tokens` is the length of the prefix that is a hit
    when all pieces are written. `full_length_bytes` is explained in `transfer_report.FetchReport`.
    """

    pieces: tuple[tuple[BlockRange, int], ...]
    num_tokens: int
    num_blocks: int
    full_length_bytes: int


class KvStore(Protocol):
    """One worker's KV cache, as KV transfer uses it."""

    # Source

    def open_export(self, export_id: str, query: PrefixQuery) -> PrefixOffer | None:
        """Reference the live blocks at the query's longest boundary that is a hit here; None if there is none.

        Raises:
            ValueError: the cache has other groups than the query says.
        """

    def read_export(self, export_id: str, blocks: BlockRange) -> Sequence[bytes]:
        """Return, for each rank, the bytes of these blocks of an export, one after the other. Raises KeyError: the export has
        ended."""

    def close_export(self, export_id: str) -> None:
        """Release the blocks of an export."""

    def published(self, request_id: str) -> PrefixQuery | None:
        """Return a query, as another worker may ask it early, for the part of a request's prompt that is cached here; None if the
        request has ended."""

    # Target

    def own_query(self, query: PrefixQuery) -> PrefixQuery | None:
        """Return a query of the source's as this worker asks it; None if this worker has another model or other groups."""

    def query(self, request_id: str, num_tokens: int) -> PrefixQuery | None:
        """Return the query for the first `num_tokens` tokens of a held request; None if the request has ended or its prefix has no
        whole hash block."""

    def probe(self, num_bytes: int, *, by_calls: bool) -> PrefixQuery | None:
        """Return a query for any blocks of a source with about `num_bytes`, which must not be published; None if there can be none.
        `by_calls`: this worker's ranks do not read the source's memory."""

    def has(self, request_id: str, query: PrefixQuery) -> bool:
        """Return whether a search here already finds as many tokens as the router expects from the source.

        If so, blocks that were imported for another request with this prefix are kept for this request, too.
        """

    def begin_import(self, import_id: str, query: PrefixQuery, offer: PrefixOffer) -> ImportPlan | None:
        """Allocate host blocks for the offered blocks that are missing here; return None if the host tier has no room."""

    def convert(self, offer: PrefixOffer, blocks: BlockRange, data: Sequence[Bytes]) -> Sequence[Bytes]:
        """Return the bytes of each of this worker's ranks, cut and joined from those of the source's ranks. Any thread may call
        it."""

    def write_import(self, import_id: str, blocks: BlockRange, data: Sequence[Bytes]) -> None:
        """Write converted blocks. Raises KeyError: the import has ended, since the cache was emptied."""

    def publish_import(self, import_id: str, request_id: str) -> None:
        """Publish the imported blocks in the host tier. They are kept there until the request is admitted or has ended, but only
        for a limited time. Raises KeyError: the import has ended.
        """

    def drop_import(self, import_id: str) -> bool:
        """Free the blocks of an import that is not complete, and return True. Return False while bytes may still be read into
        them: then the import publishes nothing any more, and the caller must call again."""

    def begin_read(self, import_id: str, offer: PrefixOffer, on_end: Callable[[str, float], None]) -> None:
        """Let the ranks read all blocks of an import out of the memory of the offer's ranks.

        When no byte can come any more, `on_end` is called on any thread, once or more often, with the reason why the blocks are not
        what the source offered, or "" if they are, and the seconds that the slowest rank read.

        Raises:
            KeyError: the import has ended.
        """

    def take_read_ends(self) -> None:
        """Let reports of ended reads come in, for which an engine with work need not be asked. Raises StepFailed: the ranks do not
        run."""
