"""Makes the router's OpenTelemetry spans: one for each HTTP request with a prompt, and below it one for each attempt at a worker.

Names and attributes follow OpenTelemetry's conventions for HTTP servers and generative AI. A worker's own spans are below the span
of their attempt. If a worker dies, its own spans are lost, but the attempt's span, which the router makes, still names the worker:

    POST /v1/completions            the request, at the router
      worker  (w0, error: lost)     the first attempt
      worker  (w1)                  the second attempt
        queue, prefill, decode      at the worker w1
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transom_cluster.telemetry.request_events import (
    Ended,
    Failed,
    Finished,
    HandedOver,
    Lost,
    Placed,
    RequestEvent,
    TurnedAway,
)
from transom_cluster.telemetry.request_timeline import RequestTimeline
from transom_core import __version__
from transom_core.clock import steady_time_s
from transom_core.config import TracingConfig
from transom_core.contract import SamplingParams
from transom_core.logs import trace_id_of
from transom_core.telemetry.genai_names import OPERATIONS, PROVIDER, wants_latest_names
from transom_core.telemetry.tracing import Tracing, nanoseconds

LATER_OPERATIONS = (
    "/v1/responses",
    "/v1/messages",
)  # these have OpenTelemetry's name only where the latest names are wanted
FIRST_ERROR_STATUS = 500  # a lower error status is the client's fault and does not mark the server's span as failed


class RouterTracing:
    """Makes one router's spans. Runs on the router's event loop; a thread exports the spans that have ended."""

    def __init__(self, tracing: Tracing, *, model: str) -> None:
        self.tracing = tracing
        self._model = model
        self._has_latest_names = wants_latest_names()

    @classmethod
    def from_config(cls, config: TracingConfig, router_id: str, *, model: str) -> RouterTracing:
        """Make the tracing of a router that sends its spans to `config.endpoint`."""
        return cls(Tracing(config, role="router", name=router_id, version=__version__), model=model)

    def begin(self, path: str, headers: Mapping[str, str]) -> RequestTrace:
        """Begin the span of a request that arrives now, below the span in the client's `traceparent` header, if any."""
        attributes = {
            "http.request.method": "POST",
            "http.route": path,
            "gen_ai.operation.name": path.strip("/"),
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
        }
        if path in OPERATIONS and (self._has_latest_names or path not in LATER_OPERATIONS):
            attributes["gen_ai.operation.name"] = OPERATIONS[path]
        if self._has_latest_names:
            attributes["gen_ai.response.model"] = self._model
        parent = self.tracing.context_of(headers)
        span = self.tracing.start(f"POST {path}", parent, kind="SERVER", at_s=steady_time_s(), attributes=attributes)
        return RequestTrace(self.tracing, span, has_latest_names=self._has_latest_names)

    def close(self) -> None:
        """Export the spans that have ended. This takes a few seconds at most."""
        self.tracing.close()


class RequestTrace:
    """The sink that makes the spans of one request and of its attempts; implements `SpanSink`."""

    def __init__(self, tracing: Tracing, span: Any, *, has_latest_names: bool = False) -> None:
        self._tracing, self._has_latest_names = tracing, has_latest_names
        self._span = span
        self._below = tracing.context_below(span)
        self._attempts: dict[int, Any] = {}  # choice -> span of its running attempt
        self.trace_id = trace_id_of(tracing.parent_header(span))

    def describe(self, params: SamplingParams, *, num_choices: int, stream: bool) -> None:
        """Add the sampling parameters of a client's request to its span, but no text of the request, not even stop strings."""
        attributes: dict[str, Any] = {
            "gen_ai.request.choice.count": num_choices,
            "gen_ai.request.stream": stream,
            "gen_ai.request.temperature": float(params.temperature),
            "gen_ai.request.top_p": float(params.top_p),
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        if self._has_latest_names:
            attributes["gen_ai.request.frequency_penalty"] = float(params.frequency_penalty)
            attributes["gen_ai.request.presence_penalty"] = float(params.presence_penalty)
            attributes |= {"gen_ai.request.top_k": params.top_k} if params.top_k > 0 else {}
            attributes |= {"gen_ai.request.seed": params.seed} if params.seed is not None else {}
        self._span.set_attributes(attributes)

    def receive(self, event: RequestEvent) -> None:
        """Begin a span when an attempt is placed, and end it with the event that ends the attempt.

        An attempt that is still open when the whole request has ended was abandoned, and its span says so.
        """
        match event:
            case Placed():
                self._begin_attempt(event)
            case TurnedAway(choice=choice, error=error) | Failed(choice=choice, error=error):
                self._end_attempt(choice, error)
            case Lost(choice=choice, cause=cause):
                self._end_attempt(choice, cause)
            case Finished(choice=choice) | HandedOver(choice=choice):
                self._end_attempt(choice)
            case Ended():
                for choice in list(self._attempts):
                    self._attempts[choice].set_attribute("transom.abandoned", True)
                    self._end_attempt(choice)

    def trace_parent(self, choice: int) -> str:
        """Return the traceparent header of the present attempt's span, for the worker's own spans."""
        return self._tracing.parent_header(self._attempts[choice])

    def end(self, status: int, timeline: RequestTimeline | None) -> None:
        """End the request's span after the response's last byte. `timeline` is None if the request was refused without one."""
        error = ""
        if timeline is not None:
            self._span.set_attributes(_response_attributes(timeline))
            error = timeline.error
        self._span.set_attribute("http.response.status_code", status)
        if error or status >= FIRST_ERROR_STATUS:
            self._tracing.fail(self._span, error or str(status))
        self._span.end(nanoseconds(steady_time_s()))

    def _begin_attempt(self, placed: Placed) -> None:
        self._end_attempt(placed.choice)
        attributes = {
            "transom.worker": placed.worker,
            "transom.choice": placed.choice,
            "transom.routing_policy": placed.policy,
            "transom.placement_reason": placed.reason,
            "transom.predicted_hit_tokens": placed.predicted_hit_tokens,
            "transom.resumed_tokens": placed.resumed_tokens or 0,
        }
        span = self._tracing.start("worker", self._below, kind="CLIENT", at_s=steady_time_s(), attributes=attributes)
        self._attempts[placed.choice] = span

    def _end_attempt(self, choice: int, error: str = "") -> None:
        """End the span of a choice's present attempt, if there is one, with the class of an error or the cause of a loss."""
        span = self._attempts.pop(choice, None)
        if span is not None:
            if error:
                self._tracing.fail(span, error)
            span.end(nanoseconds(steady_time_s()))


def _response_attributes(timeline: RequestTimeline) -> dict[str, Any]:
    """Return the attributes of a response."""
    attributes: dict[str, Any] = {
        "gen_ai.response.id": timeline.request_id,
        "gen_ai.usage.input_tokens": timeline.num_prompt_tokens,
        "gen_ai.usage.output_tokens": timeline.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": timeline.num_hit_tokens,
        "gen_ai.response.finish_reasons": [timeline.finish_reasons[index] for index in sorted(timeline.finish_reasons)],
        "transom.grammar": timeline.has_grammar,
        "transom.tool_calls": timeline.num_tool_calls,
        "transom.reasoning_tokens": timeline.num_reasoning_tokens,
        "transom.workers": list(timeline.workers),
        "transom.resumes": timeline.num_resumes,
        "transom.client_left": timeline.has_left,
    }
    if timeline.first_token_s:
        attributes["gen_ai.response.time_to_first_chunk"] = timeline.first_token_s - timeline.arrival_s
    return attributes
