"""`TransferObserver`: what KV transfer reports for metrics; this one ignores every report."""

from __future__ import annotations

from transom_worker.kvcache.tiers.transfer.transfer_report import ExportOutcome, FetchReport


class TransferObserver:
    """Receives the reports of one worker, on its event loop."""

    def fetched(self, report: FetchReport) -> None:
        """A fetch has ended; of requests that share one, it is reported once."""

    def exported(self, outcome: ExportOutcome) -> None:
        """An export has ended, or was refused."""

    def sent(self, num_bytes: int) -> None:
        """Bytes of blocks were read for another worker."""
