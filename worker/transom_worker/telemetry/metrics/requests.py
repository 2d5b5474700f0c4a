"""Metrics of requests and of their times, with exemplars, which are updated a few times per request; and of KV transfer: prefixes
that this worker fetched from other workers, and prefixes that it lent to them."""

from transom_core.clock import steady_time_s
from transom_core.errors import Overloaded, RequestError, WorkerLost
from transom_core.telemetry.metric_families import MetricFamilies
from transom_worker.telemetry.engine_events import EngineEventSink, RequestTimes
from transom_worker.telemetry.transfer_report import (
    EXPORT_OUTCOMES,
    FETCH_OUTCOMES,
    ExportOutcome,
    FetchReport,
    TransferObserver,
)

REQUEST_BUCKETS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0),
    *(20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
FINISH_REASONS = ("stop", "length", "abort", "error", "handover")
REFUSALS = ("overloaded", "worker_unavailable", "request_refused", "internal_error")
REFUSAL_REASONS = ((Overloaded, "overloaded"), (WorkerLost, "worker_unavailable"), (RequestError, "request_refused"))
"""Label values of `transom_requests_refused_total` by class of error; any other error is an `internal_error`."""

LENGTH_BUCKETS = (1, 4, 16, *(2**power for power in range(5, 21)))  # tokens


class Requests(EngineEventSink):
    """Counters and histograms of requests. Exemplars (of request, queue, prefill and first-token times) appear only in
    OpenMetrics."""

    def __init__(self, families: MetricFamilies) -> None:
        self._ended = families.counter(
            "transom_requests",
            "Requests that ended: stop, length, abort (the client left), error, or handover (from a prefill worker to "
            "another one).",
            "finish_reason",
            values=FINISH_REASONS,
        )
        self._request_s = families.histogram(
            "transom_request_seconds",
            "Seconds from a request's arrival at this worker to its end.",
            REQUEST_BUCKETS_S,
            "finish_reason",
            values=FINISH_REASONS,
        )
        self._refused = families.counter(
            "transom_requests_refused",
            "Requests that the worker refused: overloaded (its queue is full), worker_unavailable (its ranks start "
            "again, or its engine has ended), request_refused (wrong, or too long) or internal_error.",
            "reason",
            values=REFUSALS,
        )
        self._prompt_length = families.histogram(
            "transom_request_prompt_tokens", "Prompt tokens of each admitted request.", LENGTH_BUCKETS
        ).of()
        self._output_length = families.histogram(
            "transom_request_output_tokens",
            "Output tokens of each request that ended, with those from lost workers.",
            LENGTH_BUCKETS,
        ).of()
        self._queue_s = families.histogram(
            "transom_queue_seconds",
            "Seconds from a request's arrival at this worker to the first step that computes it.",
            REQUEST_BUCKETS_S,
        ).of()
        self._prefill_s = families.histogram(
            "transom_prefill_seconds",
            "Seconds from the first step that computes a request to its first token.",
            REQUEST_BUCKETS_S,
        ).of()
        self._first_token_s = families.histogram(
            "transom_first_token_seconds",
            "Seconds from a request's arrival at this worker to its first token from here.",
            REQUEST_BUCKETS_S,
        ).of()
        self._decode_s = families.histogram(
            "transom_decode_seconds", "Seconds from a request's first token to its last one.", REQUEST_BUCKETS_S
        ).of()

    def refused(self, error: Exception) -> None:
        """The engine has refused a request with `error`."""
        reasons = (reason for kind, reason in REFUSAL_REASONS if isinstance(error, kind))
        self._refused.of(next(reasons, "internal_error")).inc()

    def first_scheduled(self, times: RequestTimes, *, num_prompt_tokens: int) -> None:
        """A request left the queue for the first time."""
        self._prompt_length.observe(num_prompt_tokens)
        self._queue_s.observe(max(0.0, times.scheduled_s - times.arrival_s), times.exemplar)

    def first_token(self, times: RequestTimes, now_s: float) -> None:
        """A request got its first token."""
        times.first_token_s = now_s
        self._first_token_s.observe(max(0.0, now_s - times.arrival_s), times.exemplar)
        self._prefill_s.observe(max(0.0, now_s - times.scheduled_s), times.exemplar)

    def finished(self, times: RequestTimes, finish_reason: str, *, num_output_tokens: int) -> None:
        """A request ended."""
        self._ended.of(finish_reason).inc()
        self._output_length.observe(num_output_tokens)
        self._request_s.of(finish_reason).observe(max(0.0, steady_time_s() - times.arrival_s), times.exemplar)
        if times.first_token_s:
            self._decode_s.observe(max(0.0, times.last_token_s - times.first_token_s))


BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
OUTCOMES = (*(("in", outcome) for outcome in FETCH_OUTCOMES), *(("out", outcome) for outcome in EXPORT_OUTCOMES))


class Transfers(TransferObserver):
    """Counts what a worker's KV transfer reports. Any thread may call it."""

    def __init__(self, families: MetricFamilies) -> None:
        self._ended = families.counter(
            "transom_kv_transfers",
            "Transfers of a cached prefix that ended. Into this worker (in): fetched, present (it had everything by "
            "then), not_found (evicted at the other one), no_space (here), refused, timeout, source_lost, cancelled "
            "(the request ended before) or failed. Out of it (out): read, expired (the other worker fell silent), "
            "refused or not_found.",
            "direction",
            "outcome",
        )
        for of in OUTCOMES:
            self._ended.of(*of)
        self._moved = families.counter(
            "transom_kv_transfer_bytes",
            "Bytes of KV blocks that came from other workers (in) or were read for them (out).",
            "direction",
            values=("in", "out"),
        )
        self._full_length = families.counter(
            "transom_kv_transfer_full_length_bytes",
            "Bytes that transfers into this worker would have had with all tokens of window groups.",
        ).of()
        self._seconds = families.histogram(
            "transom_kv_transfer_seconds",
            "Seconds that a request was held while its prefix came from another worker.",
            BUCKETS_S,
        ).of()

    def fetched(self, report: FetchReport) -> None:
        """A fetch has ended."""
        self._ended.of("in", report.outcome).inc()
        self._moved.of("in").inc(report.num_bytes)
        self._full_length.inc(report.full_length_bytes)
        self._seconds.observe(report.seconds)

    def exported(self, outcome: ExportOutcome) -> None:
        """An export has ended, or was refused."""
        self._ended.of("out", outcome).inc()

    def sent(self, num_bytes: int) -> None:
        """Bytes of blocks were read for another worker."""
        self._moved.of("out").inc(num_bytes)
