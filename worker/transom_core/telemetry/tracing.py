"""Makes OpenTelemetry spans in one process and sends them over OTLP in batches. No other module imports the SDK, and this one does
so only if tracing is on.

A slow or unreachable collector delays no request: spans wait in a bounded queue, a thread sends them, and those that find the
queue full are dropped.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from transom_core.config import TracingConfig
from transom_core.errors import ConfigError

if TYPE_CHECKING:  # optional packages, imported only with tracing on
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

Kind = Literal["INTERNAL", "SERVER", "CLIENT"]

BATCH_MS = 1000  # between two sends; a process that is killed loses the spans of this time
FLUSH_S = 5.0  # the longest time that sending the queued spans may delay the end of the process

MISSING = (
    "--otlp-traces-endpoint is {endpoint}, and OpenTelemetry's {what} is not installed; "
    "pip install 'transom[tracing]', or leave the flag out."
)


class Tracing:
    """One process's tracer. A request's parent span decides whether it is sampled; without a parent `sample_ratio` decides.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """

    def __init__(
        self, config: TracingConfig, *, role: str, name: str, version: str = "", exporter: SpanExporter | None = None
    ) -> None:
        check_tracing(config)
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        about = {"service.instance.id": f"{role}/{name}", "transom.role": role}
        if "OTEL_SERVICE_NAME" not in os.environ:
            about["service.name"] = "transom"
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
            resource=Resource.create(about),
            shutdown_on_exit=False,  # it would wait for an unreachable collector
        )
        delay_ms = float(os.environ.get("OTEL_BSP_SCHEDULE_DELAY", BATCH_MS))
        exporter = exporter or _otlp_exporter(config.endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=delay_ms))
        self._tracer = self._provider.get_tracer("transom", version)
        self._propagator = TraceContextTextMapPropagator()

    def context_of(self, headers: Mapping[str, str]) -> Context:
        """Return the parent context that the W3C headers traceparent and tracestate name; an empty one if they are malformed."""
        from opentelemetry.context import Context

        return self._propagator.extract(headers, context=Context())

    def context_below(self, span: Span) -> Context:
        """Return the parent context for a span's children."""
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        return set_span_in_context(span, Context())

    def start(
        self, name: str, parent: Context, *, at_s: float, attributes: Mapping[str, Any], kind: Kind = "INTERNAL"
    ) -> Span:
        """Start a span that began at `at_s` (seconds since the epoch); the caller ends it."""
        from opentelemetry.trace import SpanKind

        return self._tracer.start_span(
            name, parent, kind=SpanKind[kind], attributes=attributes, start_time=nanoseconds(at_s)
        )

    def parent_header(self, span: Span) -> str:
        """Return the W3C traceparent header that names a span as parent."""
        headers: dict[str, str] = {}
        self._propagator.inject(headers, context=self.context_below(span))
        return headers["traceparent"]

    def fail(self, span: Span, kind: str) -> None:
        """Mark a span as failed. `kind` is the class of the error; the error's message may quote a prompt and is left out."""
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, kind))
        span.set_attribute("error.type", kind)

    def close(self) -> None:
        """Send the queued spans, for `FLUSH_S` seconds at most; later spans are not sent. Idempotent."""
        thread = threading.Thread(target=self._provider.shutdown, name="transom-traces-end", daemon=True)
        thread.start()
        thread.join(FLUSH_S)


def check_tracing(config: TracingConfig) -> None:
    """Raise ConfigError if OpenTelemetry is not installed."""
    try:
        import opentelemetry.sdk.trace
    except ImportError:
        raise ConfigError(MISSING.format(endpoint=config.endpoint, what="SDK")) from None
    try:
        import opentelemetry.exporter.otlp.proto.http  # noqa: F401
    except ImportError:
        raise ConfigError(MISSING.format(endpoint=config.endpoint, what="OTLP exporter")) from None


def nanoseconds(at_s: float) -> int:
    """Convert seconds since the epoch to nanoseconds, OpenTelemetry's unit."""
    return int(at_s * 1e9)


def is_sampled(trace_parent: str) -> bool:
    """Return whether a W3C traceparent header says that its trace is recorded."""
    return bool(int(trace_parent.rsplit("-", 1)[1], 16) & 1)


def traces_url(endpoint: str) -> str:
    """Return the URL that spans are sent to: `endpoint`, with OTLP's usual path if it has none."""
    has_path = urlsplit(endpoint).path not in ("", "/")
    return endpoint if has_path else endpoint.rstrip("/") + "/v1/traces"


def _otlp_exporter(endpoint: str) -> SpanExporter:
    """Return the OTLP exporter. OpenTelemetry's variables (OTEL_EXPORTER_OTLP_...) set its headers, timeout, compression and
    certificates."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=traces_url(endpoint))
