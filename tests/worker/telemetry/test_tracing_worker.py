"""A worker's spans: queue, prefill and decode below the request's parent span, made when it has ended, and only with tracing on."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.engine_driver import make_engine, make_request, run
from tests.worker.conftest import Start
from transom_core.config import TracingConfig
from transom_core.contract import Request
from transom_core.errors import ConfigError, WorkerLost
from transom_core.settings.settings import Settings
from transom_core.telemetry.tracing import Tracing
from transom_worker.engine.engine import Engine
from transom_worker.telemetry.timeline_exporter import RequestSpans, TimelineExporter

ENDPOINT = "http://127.0.0.1:9/v1/traces"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Traced:
    """An engine whose spans stay in memory."""

    def __init__(self, model: Path, sample_ratio: float = 1.0, **settings: Any) -> None:
        self.engine: Engine = make_engine(str(model), **settings)
        self.exporter = InMemorySpanExporter()
        config = TracingConfig(endpoint=ENDPOINT, sample_ratio=sample_ratio)
        own = Tracing(config, role="worker", name="w7", exporter=self.exporter)
        self.engine.timelines.exporter = TimelineExporter([RequestSpans(own, "w7")], close_formats=own.close)

    def spans(self) -> tuple[ReadableSpan, ...]:
        """All spans, after the engine's end."""
        self.engine.shutdown()
        return self.exporter.get_finished_spans()


@pytest.fixture
def traced(tiny_model: Path) -> Iterator[Traced]:
    made = Traced(tiny_model, block_size=8)
    yield made
    made.engine.shutdown()


def parent_of(flags: str = "01") -> str:
    return f"00-{TRACE}-{PARENT}-{flags}"


def with_parent(request_id: str, parent: str | None, **params: Any) -> Request:
    return replace(make_request(request_id, list(range(1, 30)), **params), trace_parent=parent)


def test_three_spans_one_after_the_other(traced: Traced) -> None:
    run(traced.engine, [with_parent("before", None, max_tokens=2)])
    run(traced.engine, [with_parent("a", parent_of(), max_tokens=6)])
    spans = [span for span in traced.spans() if span.attributes["transom.request_id"] == "a"]
    queue, prefill, decode = sorted(spans, key=lambda span: span.start_time)
    assert [span.name for span in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    for span in (queue, prefill, decode):
        assert f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == PARENT
        assert span.attributes["transom.worker"] == "w7"
        assert span.status.is_ok or not span.status.status_code.value
    assert queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    assert prefill.attributes["transom.tokens.hit"] == 24
    assert prefill.attributes["transom.tokens.repaired"] == 0
    assert prefill.attributes["transom.tokens.missed_below_alignment"] == 5
    assert decode.attributes["gen_ai.usage.output_tokens"] == 6
    assert decode.attributes["transom.preemptions"] == 0
    assert decode.attributes["transom.finish_reason"] == "length"
    assert queue.resource.attributes["service.instance.id"] == "worker/w7"


def test_a_request_without_a_parent_gets_a_span_of_its_own(traced: Traced) -> None:
    run(traced.engine, [with_parent("a", None, max_tokens=2)])
    spans = {span.name: span for span in traced.spans()}
    assert spans["request"].parent is None
    for name in ("queue", "prefill", "decode"):
        assert spans[name].parent.span_id == spans["request"].context.span_id


def test_a_request_whose_trace_is_not_sampled_has_no_spans(traced: Traced) -> None:
    run(traced.engine, [with_parent("a", parent_of("00"))])
    assert not traced.spans()


def test_the_ratio_is_for_requests_without_a_parent(tiny_model: Path) -> None:
    made = Traced(tiny_model, sample_ratio=0.0)
    run(made.engine, [with_parent("a", None)])
    run(made.engine, [with_parent("b", parent_of(), max_tokens=2)])
    assert {span.attributes["transom.request_id"] for span in made.spans()} == {"b"}


def test_the_last_span_of_a_request_that_failed_says_so(traced: Traced) -> None:
    traced.engine.add(with_parent("a", parent_of()))
    traced.engine.step()
    traced.engine.add(with_parent("b", parent_of()))
    traced.engine.fail(WorkerLost("gone"))
    by_request = {(span.attributes["transom.request_id"], span.name): span for span in traced.spans()}
    assert set(by_request) == {("a", "queue"), ("a", "prefill"), ("a", "decode"), ("b", "queue")}
    failed = {key for key, span in by_request.items() if not span.status.is_ok and span.status.description}
    assert failed == {("a", "decode"), ("b", "queue")}


def test_an_unreachable_collector_changes_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.01")  # seconds until the exporter gives up
    engine = start(otlp_traces_endpoint=ENDPOINT)
    [whole] = run(engine, [with_parent("a", parent_of(), max_tokens=4)])
    assert len(whole.token_ids) == 4


@pytest.mark.parametrize("what", ["opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http"])
def test_without_the_package_the_start_fails_with_advice(
    start: Start, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setitem(sys.modules, what, None)
    with pytest.raises(ConfigError, match=r"pip install 'transom\[tracing\]'"):
        start(otlp_traces_endpoint=ENDPOINT)


def test_settings() -> None:
    settings = Settings.parse(model="m", otlp_traces_endpoint="https://collector:4318", trace_sample_ratio=0.25)
    for config in (settings.engine_config(), settings.server_config()):
        assert config.tracing == TracingConfig(endpoint="https://collector:4318", sample_ratio=0.25)
    assert Settings.parse(model="m").engine_config().tracing is None
    for endpoint in ("grpc://collector:4317", "collector", "http://"):
        with pytest.raises(ConfigError, match="otlp-traces-endpoint"):
            Settings.parse(model="m", otlp_traces_endpoint=endpoint)
    with pytest.raises(ConfigError, match="trace_sample_ratio"):
        Settings.parse(model="m", trace_sample_ratio=2)
