"""What KV transfer reports: `FetchReport` says how the fetch of a request's prefix ended, and `TransferObserver` receives the
reports."""

from dataclasses import dataclass
from typing import Literal, get_args

FetchOutcome = Literal[
    "fetched", "present", "not_found", "no_space", "refused", "timeout", "source_lost", "cancelled", "failed"
]
"""fetched: the blocks are in the KV pool or the host tier; present: all of them were here already; not_found: the source had
evicted the prefix; no_space: neither had room; refused: the source has too many open transfers, or its cache is of another kind;
timeout: it took too long; source_lost: a call to the source failed; cancelled: the request ended before; failed: an error here."""

FETCH_OUTCOMES: tuple[FetchOutcome, ...] = get_args(FetchOutcome)

ExportOutcome = Literal["read", "expired", "refused", "not_found"]
"""read: the target closed the export; expired: the target was not heard of for too long; refused, not_found: as above."""

EXPORT_OUTCOMES: tuple[ExportOutcome, ...] = get_args(ExportOutcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchReport:
    """One fetch: its source with its `PrefixSource.place`, its outcome, the length of the prefix in tokens, and the blocks and
    bytes that it brought.

    `full_length_bytes` is how many bytes it would have brought if every group kept all of its tokens; sliding groups keep fewer.
    """

    source: str
    outcome: FetchOutcome
    num_tokens: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    full_length_bytes: int = 0
    place: str = ""
    wire: str = ""  # the name of the `Wire` that brought the blocks
    seconds: float = 0.0
    on_device: bool = False  # the blocks came straight into the KV pool, not into the host tier
    read_s: float = 0.0  # of which blocks moved: the slowest rank's read of the source's memory, or the calls


class TransferObserver:
    """Receives the reports of one worker, on its event loop; this one ignores every report."""

    def fetched(self, report: FetchReport) -> None:
        """Receive the report of a fetch that has ended; each request with a fetch has one report, and so have early fetches and
        probes."""

    def exported(self, outcome: ExportOutcome) -> None:
        """Note that an export has ended, or was refused."""

    def sent(self, num_bytes: int) -> None:
        """Note that `num_bytes` of blocks were read for another worker."""
