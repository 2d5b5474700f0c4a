"""Spans across router and workers: one trace from the client's own, whatever happens in between, and none where not wanted.

JSON log lines of a router and a worker: each writes one line per request, with the same request id and trace id.
"""

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.cluster.conftest import PATIENT, Api, running_api, until
from tests.cluster.engine_server import engine_server
from tests.cluster.stub_worker import StubWorker, stub_workers
from transom_cluster.http.api import build_api
from transom_cluster.telemetry.router_tracing import RouterTracing
from transom_core import logs
from transom_core.config import TracingConfig
from transom_core.contract import ErrorInfo
from transom_core.errors import Overloaded, StepFailed
from transom_core.telemetry.tracing import Tracing, is_sampled

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ROOT = Path(__file__).parents[3]
ENDPOINT = "http://127.0.0.1:9/v1/traces"
MARK = "zebra4711"


class Collector(InMemorySpanExporter):  # type: ignore[misc]
    """Keeps the spans of all processes that a test plays; they are not lost when one of those ends."""

    def shutdown(self) -> None:
        """Others still send."""


@pytest.fixture
def collector() -> Collector:
    return Collector()


def traced(exporter: SpanExporter, *, sample_ratio: float = 1.0, model: str = "stub") -> RouterTracing:
    """The tracing of a router whose spans go to `exporter`."""
    config = TracingConfig(endpoint=ENDPOINT, sample_ratio=sample_ratio)
    return RouterTracing(Tracing(config, role="router", name="r0", exporter=exporter), model=model)


def named(collector: Collector, name: str) -> list[ReadableSpan]:
    spans = [span for span in collector.get_finished_spans() if span.name == name]
    return sorted(spans, key=lambda span: span.start_time)


def is_below(span: ReadableSpan, above: ReadableSpan) -> bool:
    return span.parent.span_id == above.context.span_id and span.context.trace_id == above.context.trace_id


def client_parent(flags: str) -> dict[str, str]:
    return {"traceparent": f"00-{TRACE}-{PARENT}-{flags}", "tracestate": "vendor=1"}


async def ask(api: Api, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    wanted = {"prompt": MARK, "max_tokens": 3, "stop": MARK, **body}
    return await api.client.post("/v1/completions", json=wanted, headers=headers)


async def test_a_span_for_the_request_and_one_for_its_worker(collector: Collector) -> None:
    async with running_api(StubWorker(), tracing=traced(collector)) as api:
        response = await ask(api, client_parent("01"), temperature=0.5)
        await api.client.get("/metrics")
        sent_parent = api.worker.submitted[0].trace_parent
    [span], [attempt] = named(collector, "POST /v1/completions"), named(collector, "worker")
    assert len(collector.get_finished_spans()) == 2
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.context.trace_state.get("vendor") == "1"
    assert (span.kind, attempt.kind) == (SpanKind.SERVER, SpanKind.CLIENT)
    assert is_below(attempt, span)
    assert sent_parent == f"00-{TRACE}-{attempt.context.span_id:016x}-01"
    wanted = {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "stub",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.id": response.json()["id"],
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": len(MARK),
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "transom.workers": ("w0",),
    }
    assert span.attributes.items() >= wanted.items()
    assert 0 < span.attributes["gen_ai.response.time_to_first_chunk"] < 60
    assert span.status.status_code is StatusCode.UNSET
    assert MARK not in "".join(one.to_json() for one in collector.get_finished_spans())


@pytest.mark.parametrize("is_latest", [False, True])
async def test_the_latest_names_are_there_for_who_asks(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, is_latest: bool
) -> None:
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", "http,gen_ai_latest_experimental" if is_latest else "http")
    async with running_api(StubWorker(), tracing=traced(collector)) as api:
        message = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "top_k": 5}
        assert (await api.client.post("/v1/messages", json=message)).status_code == 200
        page = (await api.client.get("/metrics")).text
    [span] = named(collector, "POST /v1/messages")
    wanted = {"gen_ai.request.top_k": 5, "gen_ai.request.presence_penalty": 0.0, "gen_ai.response.model": "stub"}
    assert (span.attributes.items() >= wanted.items()) == is_latest
    assert is_latest != wanted.keys().isdisjoint(span.attributes)
    assert span.attributes["gen_ai.operation.name"] == ("chat" if is_latest else "v1/messages")
    names = 'gen_ai_provider_name="transom",gen_ai_request_model="stub",service_instance_id="router/r0"}'
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        operation = "chat" if name == "request_duration" else "inference"
        count = 2.0 if name == "time_per_output_token" else 1.0
        series = f'gen_ai_server_{name}_seconds_count{{gen_ai_operation_name="{operation}",{names} {count}'
        assert (series in page) == is_latest, series
    assert ("gen_ai_" in page) == is_latest


@pytest.mark.parametrize(
    ("ratio", "headers", "is_traced"),
    [
        (1.0, client_parent("00"), False),
        (0.0, client_parent("01"), True),
        (0.0, {}, False),
        (1.0, {}, True),
        (1.0, {"traceparent": "nonsense"}, True),
        (1.0, {"traceparent": f"00-{'0' * 32}-{PARENT}-01"}, True),
    ],
)
async def test_a_client_with_a_trace_decides_else_the_ratio_and_a_trace_begins(
    collector: Collector, ratio: float, headers: dict[str, str], is_traced: bool
) -> None:
    async with running_api(StubWorker(), tracing=traced(collector, sample_ratio=ratio)) as api:
        assert (await ask(api, headers)).status_code == 200
        parent = api.worker.submitted[0].trace_parent
    spans = named(collector, "POST /v1/completions")
    assert [span.parent is None for span in spans] == [headers != client_parent("01")] * is_traced
    assert parent is not None
    assert is_sampled(parent) == is_traced  # workers do as the router did


async def test_errors_set_the_status(collector: Collector) -> None:
    full = ErrorInfo.of(Overloaded(MARK))
    async with running_api(StubWorker(admission_error=full), tracing=traced(collector)) as api:
        assert (await ask(api)).status_code == 503
    async with running_api(StubWorker(step_error=ErrorInfo.of(StepFailed(MARK))), tracing=traced(collector)) as api:
        assert "error" in (await ask(api, stream=True)).text
        assert (await ask(api, temperature=-1)).status_code == 400
    refused, broken, wrong = named(collector, "POST /v1/completions")
    for span, kind, status in ((refused, "Overloaded", 503), (broken, "StepFailed", 200)):
        assert span.status.status_code is StatusCode.ERROR
        assert span.attributes.items() >= {"error.type": kind, "http.response.status_code": status}.items()
    assert wrong.attributes["http.response.status_code"] == 400
    assert wrong.status.status_code is StatusCode.UNSET
    assert [one.attributes["error.type"] for one in named(collector, "worker")] == ["Overloaded", "StepFailed"]
    assert MARK not in "".join(one.to_json() for one in collector.get_finished_spans())


async def test_a_client_that_leaves_ends_its_spans(collector: Collector) -> None:
    async with running_api(StubWorker(max_events=1), tracing=traced(collector)) as api:
        call = api.call("/v1/completions", {"prompt": "hi", "max_tokens": 9, "stream": True})
        await call.begun()
        await call.leave()
    [span], [attempt] = named(collector, "POST /v1/completions"), named(collector, "worker")
    assert span.attributes["transom.client_left"] is True
    assert attempt.attributes["transom.abandoned"] is True


async def test_a_request_that_went_on_elsewhere_shows_both_workers(collector: Collector) -> None:
    workers = stub_workers(2, max_events=3)
    async with running_api(*workers, routing_policy="round_robin", **PATIENT, tracing=traced(collector)) as api:
        asking = asyncio.create_task(ask(api, client_parent("01"), max_tokens=6))
        await until(lambda: any(worker.num_silent and worker.is_read for worker in workers))
        first, second = sorted(workers, key=lambda worker: -worker.num_silent)
        second.go()
        first.kill()
        assert (await asking).status_code == 200
    [span], [lost, resumed] = named(collector, "POST /v1/completions"), named(collector, "worker")
    assert [is_below(attempt, span) for attempt in (lost, resumed)] == [True, True]
    assert [one.attributes["transom.worker"] for one in (lost, resumed)] == [first.worker, second.worker]
    assert second.submitted[0].trace_parent == f"00-{TRACE}-{resumed.context.span_id:016x}-01"
    assert (lost.status.status_code, lost.attributes["error.type"]) == (StatusCode.ERROR, "lost")
    assert lost.attributes["transom.routing_policy"] == "round_robin"
    assert resumed.attributes.items() >= {"transom.resumed_tokens": 3, "transom.placement_reason": "only_one"}.items()
    assert span.attributes.items() >= {"transom.resumes": 1, "gen_ai.usage.output_tokens": 6}.items()
    assert [one.status.status_code for one in (resumed, span)] == [StatusCode.UNSET] * 2


async def test_the_framework_makes_no_spans_of_its_own(api: Api) -> None:
    """They would double ours, and quote what exceptions say."""
    assert not build_api(api.router)._native_telemetry.enabled()


def test_a_router_without_tracing_does_not_import_the_sdk() -> None:
    """The web framework imports the API by itself, where it is installed."""
    code = (
        "import asyncio, sys\n"
        "from tests.cluster.conftest import running_api\n"
        "async def ask():\n"
        "    async with running_api() as api:\n"
        "        assert (await api.complete()).status_code == 200\n"
        "asyncio.run(ask())\n"
        "found = [name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))]\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240, cwd=ROOT)


@pytest.fixture
def own_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON lines go to the process's standard error, and nowhere else, until the test ends."""
    logger = logging.getLogger("transom")
    monkeypatch.setattr(logs, "_process_name", "")
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger, "handlers", [])


def test_router_and_worker_have_a_line_for_each_request_and_none_contains_the_prompt(
    tiny_model: Path, own_logging: None, capfd: pytest.CaptureFixture[str]
) -> None:
    tracing = traced(InMemorySpanExporter(), model="tiny")
    logged: dict[str, Any] = {"log_format": "json"}
    with (
        engine_server(tiny_model, server=logged, tracing=tracing, kv_cache_memory_bytes="8MiB", **logged) as running,
        httpx.Client(base_url=running.url, timeout=120, trust_env=False) as client,
    ):
        body = {"prompt": MARK, "max_tokens": 4, "ignore_eos": True}
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        answers = [
            client.post("/v1/completions", json={**body, **more}, headers=headers)
            for more in ({}, {"stream": True}, {"temperature": -1})
        ]
        for method, path in (("GET", "/health"), ("GET", f"/{MARK}"), ("POST", f"/{MARK}")):
            client.request(method, path)
    ids = [answer.headers["x-request-id"] for answer in answers]
    text = capfd.readouterr().err
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert MARK not in text
    accesses = [line for line in lines if line["logger"] == "transom.access"]
    assert [(line["method"], line["path"], line["status"]) for line in accesses] == [
        ("POST", "/v1/completions", 200),
        ("POST", "/v1/completions", 200),
        ("POST", "/v1/completions", 400),
        ("GET", "other", 404),
        ("POST", "other", 404),
    ]
    assert [line.get("request_id") for line in accesses] == [*ids, None, None]
    assert [line.get("trace_id") for line in accesses] == [TRACE] * 3 + [None] * 2
    assert accesses[0].items() >= {"output_tokens": 4, "finish_reasons": ["length"], "workers": ["0"]}.items()
    assert all(line["seconds"] > 0 for line in accesses)
    ended = [line for line in lines if line["logger"] == "transom.worker.request"]
    assert [line["request_id"] for line in ended] == [f"{one}-0-0" for one in ids[:2]]
    assert all(line["trace_id"] == TRACE and line["process"] == "worker/0" for line in ended)
    assert ended[0].items() >= {"finish_reason": "length", "output_tokens": 4, "preemptions": 0}.items()
    assert ended[0]["queue_s"] >= 0
