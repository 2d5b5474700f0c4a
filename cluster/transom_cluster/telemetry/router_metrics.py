"""The router's own Prometheus metrics, with the labels `model` and `router` and with buckets that suit language models."""

from collections.abc import Callable, Iterable
from typing import get_args

from prometheus_client import Histogram

from transom_cluster.openai.answer.answer_reader import AnswerReader
from transom_cluster.telemetry.request_events import Accepted, Failed, FailoverOutcome, RequestEvent, Sent
from transom_cluster.telemetry.request_outcome import BREAK_REASONS
from transom_cluster.telemetry.router_state import RouterState, StateCollector
from transom_cluster.telemetry.routing_metrics import RoutingMetrics
from transom_core.config import MetricsCompat
from transom_core.errors import LOSS_CAUSES
from transom_core.telemetry.metric_families import MetricFamilies
from transom_core.telemetry.metrics_page import metrics_page
from transom_core.telemetry.own_labels import OwnLabels
from transom_core.telemetry.process import Process

REQUEST_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0),
    *(30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
FIRST_TOKEN_BUCKETS_S = (  # the alert rules' objective is 2 s; a bucket bound at 2 s makes their counts exact
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0),
    *(20.0, 30.0, 60.0, 120.0, 300.0),
)
INTER_TOKEN_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5),
    *(5.0, 10.0, 30.0),  # for requests that migrated or were preempted
)
MAIN_ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
MAX_EXEMPLAR_CHARS = 100  # OpenMetrics allows 128 with the label's name; an exemplar with a longer id is left out
NO_PARSER = "none"


class RouterMetrics:
    """One router's metrics, in a registry of its own. The object is a sink of request events.

    Series with fixed label values are on the page from the start, with 0, so that Prometheus' `rate` sees the first increment.
    `state` returns the router's state at every scrape.
    """

    def __init__(
        self,
        router: str,
        *,
        model: str = "",
        tool_parser: str | None = None,
        state: Callable[[], RouterState] | None = None,
        compat: MetricsCompat = "none",
    ) -> None:
        self._compat = compat
        families = MetricFamilies(model=model, router=router)
        self.registry = families.registry
        self.routing = RoutingMetrics(families)
        self.answers = AnswerMetrics(families, tool_parser)
        self._add_requests(families)
        self._add_tokens(families)
        self._add_workers(families)
        own = OwnLabels(families.own_labels)
        self.registry.register(StateCollector(own, state))
        self.registry.register(Process(own, prefix="transom_router_process", whose="router's process"))

    def _add_requests(self, families: MetricFamilies) -> None:
        self.requests = families.counter(
            "transom_router_requests",
            "HTTP requests: the status that was sent, the error's status if a stream broke off, or 499 if the client "
            "left before the last byte.",
            "endpoint",
            "status",
        )
        self._request_s = families.histogram(
            "transom_router_request_seconds",
            "From a request's arrival to the end of its response.",
            REQUEST_BUCKETS_S,
            "endpoint",
        )
        self.broken_answers = families.counter(
            "transom_router_broken_answers",
            "Responses that ended after their first byte and before their last: an error's code, or client_left.",
            "endpoint",
            "reason",
        )
        for endpoint in MAIN_ENDPOINTS:
            self._request_s.of(endpoint)
            for reason in BREAK_REASONS:
                self.broken_answers.of(endpoint, reason)
        self.open_streams = families.gauge(
            "transom_router_open_streams", "Streamed responses that are being sent."
        ).of()
        self.dropped_scrapes = families.counter(
            "transom_router_dropped_scrapes",
            "Processes left out of a page of metrics because they did not answer in time: worker or router.",
            "target",
            values=("worker", "router"),
        )

    def _add_tokens(self, families: MetricFamilies) -> None:
        self._first_token_s = families.histogram(
            "transom_router_first_token_seconds",
            "From a request's arrival to the first token of each choice.",
            FIRST_TOKEN_BUCKETS_S,
        ).of()
        self._wait_s = families.histogram(
            "transom_router_wait_seconds",
            "From an attempt's entry into the router's request queue until it is sent to a worker.",
            FIRST_TOKEN_BUCKETS_S,
        ).of()
        self.inter_token_s = families.histogram(
            "transom_router_inter_token_seconds", "Between two events of one choice.", INTER_TOKEN_BUCKETS_S
        ).of()
        self.prompt_tokens = families.counter(
            "transom_router_prompt_tokens", "Tokens of prompts whose requests were accepted, as in `usage`."
        ).of()
        self.output_tokens = families.counter(
            "transom_router_output_tokens", "Tokens sent to clients, as in `usage`."
        ).of()

    def _add_workers(self, families: MetricFamilies) -> None:
        self._failovers = families.counter(
            "transom_router_failovers",
            "Requests whose worker was lost: resumed at another worker, gave_up, or stopped as poison.",
            "outcome",
            values=get_args(FailoverOutcome),
        )
        self.drains = families.counter(
            "transom_router_drains",
            "Workers that drained: finished (all requests ended there) or moved (some migrated).",
            "outcome",
            values=("finished", "moved"),
        )
        self.worker_changes = families.counter(
            "transom_router_worker_changes",
            "Workers that joined, were lost (their stream broke, or they fell silent) or drained (left on purpose).",
            "change",
            values=("joined", "lost", "drained"),
        )
        self.losses = families.counter(
            "transom_router_worker_losses",
            "Losses of workers that had requests of this router, by cause (docs/failover.md).",
            "cause",
            values=LOSS_CAUSES,
        )
        self.judgements = families.counter(
            "transom_router_suspects",
            "Requests that were suspected of a loss, released after more tokens, cleared by another's verdict, or "
            "culprit.",
            "judgement",
            values=("suspected", "released", "cleared", "culprit"),
        )

    def receive(self, event: RequestEvent) -> None:
        """Record how long a request waited in the queue, and count the outcomes of requests whose worker was lost."""
        match event:
            case Sent(waited_s=waited_s):
                self._wait_s.observe(waited_s)
            case Accepted(is_migrated=True):
                self._failovers.of("resumed").inc()
            case Failed(failover=str(outcome)):
                self._failovers.of(outcome).inc()

    def finished(self, endpoint: str, status: int, elapsed_s: float, *, request_id: str = "") -> None:
        """Count an HTTP request that has ended. `request_id` is the id of its first choice, for the exemplar."""
        self.requests.of(endpoint, str(status)).inc()
        _observe(self._request_s.of(endpoint), elapsed_s, request_id)

    def first_token(self, elapsed_s: float, request_id: str) -> None:
        """Record the time to first token of a choice whose first token is about to be sent."""
        _observe(self._first_token_s, elapsed_s, request_id)

    def text(self, *, openmetrics: bool = False) -> str:
        """Return the metrics page in Prometheus' text format, or in OpenMetrics' format, which has exemplars."""
        return metrics_page(self.registry, openmetrics=openmetrics, compat=self._compat).decode()


class AnswerMetrics:
    """Counts what the readers of one router's answers found: tool calls, reasoning, and markup that became text."""

    def __init__(self, families: MetricFamilies, tool_parser: str | None) -> None:
        """Create the metrics. `tool_parser` is the name of the tool-call parser; None if answers have no tool calls."""
        self._parser = tool_parser or NO_PARSER
        self._calls = families.counter(
            "transom_router_tool_calls",
            "Tool calls in answers: parsed, malformed (the model wrote what its markup does not allow) or incomplete "
            "(the answer ended inside the call).",
            "parser",
            "outcome",
        )
        self._degraded = families.counter(
            "transom_router_degraded_answers",
            "Answers with markup that could not be read, so that clients got it as text.",
            "parser",
        )
        for outcome in ("parsed", "malformed", "incomplete"):
            self._calls.of(self._parser, outcome)
        self._degraded.of(self._parser)
        self._reasoning_tokens = families.counter(
            "transom_router_reasoning_tokens",
            "Output tokens that were reasoning, as in `usage`; counted when an answer ends.",
        ).of()

    def answered(self, readers: Iterable[AnswerReader]) -> None:
        """Count the answers of a response that has ended, or whose client has left; `readers` have read its choices."""
        for reader in readers:
            tally = reader.tally
            for outcome, count in (
                ("parsed", tally.num_parsed),
                ("malformed", tally.num_malformed),
                ("incomplete", tally.num_incomplete),
            ):
                if count:
                    self._calls.of(self._parser, outcome).inc(count)
            if tally.has_degraded:
                self._degraded.of(self._parser).inc()
            self._reasoning_tokens.inc(reader.num_reasoning_tokens)


def _observe(histogram: Histogram, elapsed_s: float, request_id: str) -> None:
    is_named = 0 < len(request_id) <= MAX_EXEMPLAR_CHARS
    histogram.observe(elapsed_s, {"request_id": request_id} if is_named else None)
