"""JSON log lines of a router and a worker: each writes one line per request, with the same request id and trace id."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.cluster.engine_server import engine_server
from transom_cluster.telemetry.router_tracing import RouterTracing
from transom_core import logs
from transom_core.config import TracingConfig
from transom_core.telemetry.tracing import Tracing

TRACE = "0af7651916cd43dd8448eb211c80319c"
MARK = "zebra4711"


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
    spans = Tracing(
        TracingConfig(endpoint="http://127.0.0.1:9"), role="router", name="r", exporter=InMemorySpanExporter()
    )
    tracing = RouterTracing(spans, model="tiny")
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
