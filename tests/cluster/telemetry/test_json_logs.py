"""JSON log lines of a router and a worker: each writes one line per request, with the same request id and trace id."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
TRACE = "0af7651916cd43dd8448eb211c80319c"
MARK = "zebra4711"
SERVE = """
import json, pathlib, sys
import httpx
from tests.cluster.engine_server import engine_server
from transom_cluster.telemetry.router_tracing import RouterTracing
from transom_core.config import TracingConfig
from transom_core.telemetry.tracing import Tracing
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

config = TracingConfig(endpoint="http://127.0.0.1:9/v1/traces")
spans = Tracing(config, role="router", name="r", exporter=InMemorySpanExporter())
tracing = RouterTracing(spans, model="tiny")
settings = {"kv_cache_memory_bytes": "8MiB", "num_threads": 1, "log_format": "json"}
with engine_server(pathlib.Path(sys.argv[1]), server={"log_format": "json"}, tracing=tracing, **settings) as running:
    with httpx.Client(base_url=running.url, timeout=120, trust_env=False) as client:
        body = {"prompt": "zebra4711", "max_tokens": 4, "ignore_eos": True}
        headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
        for more in ({}, {"stream": True}, {"temperature": -1}):
            print(client.post("/v1/completions", json={**body, **more}, headers=headers).headers["x-request-id"])
        client.get("/health")
        client.get("/zebra4711")
        client.post("/zebra4711")
"""


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> tuple[list[str], list[dict[str, Any]], str]:
    """Ids of the answers, lines in JSON, and everything that was written."""
    command = [sys.executable, "-c", SERVE, str(tiny_model)]
    done = subprocess.run(command, check=True, timeout=240, capture_output=True, text=True, cwd=ROOT)
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    return done.stdout.split(), lines, done.stderr


def test_the_router_has_a_line_for_each_request(served: Any) -> None:
    ids, lines, _ = served
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


def test_the_worker_has_a_line_with_the_same_request_id(served: Any) -> None:
    ids, lines, _ = served
    ended = [line for line in lines if line["logger"] == "transom.worker.request"]
    assert [line["request_id"] for line in ended] == [f"{one}-0-0" for one in ids[:2]]
    assert all(line["trace_id"] == TRACE and line["process"] == "worker/0" for line in ended)


def test_no_line_contains_the_prompt(served: Any) -> None:
    assert MARK not in served[2]
