"""The timelines of a worker's requests: hits, repairs, chunks, preemptions; in bounded memory, and without prompts or text.

A worker's spans: queue, prefill and decode below the request's parent span, made when it has ended, and only with tracing on.
"""

import json
import sys
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.engine_driver import make_engine, make_hooked_engine, make_request, run
from tests.worker.conftest import Start
from transom_core.config import TracingConfig
from transom_core.contract import Request
from transom_core.errors import ConfigError, RankLost, WorkerLost
from transom_core.settings.settings import Settings
from transom_core.telemetry.request_timelines import (
    MAX_ENDED_EVENTS,
    MAX_EVENTS,
    MAX_TIMELINES,
    Timeline,
    TimelineStore,
)
from transom_core.telemetry.tracing import Tracing
from transom_worker.engine.engine import Engine
from transom_worker.telemetry.timeline_exporter import RequestSpans, TimelineExporter

ENDPOINT = "http://127.0.0.1:9/v1/traces"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def events_of(engine: Engine, request_id: str, what: str | None = None) -> list[dict[str, Any]]:
    steps = engine.timelines.events_of(request_id)
    json.dumps(steps)
    return [step for step in steps if what in (None, step["what"])]


def kinds_of(engine: Engine, request_id: str) -> list[str]:
    return [step["what"] for step in sorted(events_of(engine, request_id), key=lambda step: step["at_s"])]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("chunk", [16, 1024])
def test_a_timeline_from_the_queue_to_the_end(start: Start, steps_in_flight: int, chunk: int) -> None:
    """The chunks of a prefill are one event, and a step that was planned ahead of its end counts as decode."""
    engine = start(steps_in_flight=steps_in_flight, max_num_batched_tokens=chunk)
    run(engine, [make_request("chatcmpl-a-0-0", list(range(1, 30)), max_tokens=9)])
    assert kinds_of(engine, "chatcmpl-a") == ["queued", "admitted", "prefill", "first_token", "decode", "finished"]
    [queued] = events_of(engine, "chatcmpl-a", "queued")
    assert queued.items() >= {"ahead": 0, "prompt_tokens": 29, "worker": "0"}.items()
    [prefill] = events_of(engine, "chatcmpl-a", "prefill")
    assert (prefill["tokens"], prefill["steps"], prefill["sequences"]) == (29, -(-29 // chunk), 1)
    [decode] = events_of(engine, "chatcmpl-a", "decode")
    assert (decode["tokens"], decode["tokens_so_far"], decode["steps"], decode["sequences"]) == (8, 9, 8, 1)
    [finished] = events_of(engine, "chatcmpl-a", "finished")
    assert (finished["reason"], finished["output_tokens"]) == ("length", 9)
    assert events_of(engine, "chatcmpl-b") == []
    assert events_of(engine, "chatcmpl") == []


def test_hits_misses_and_their_reasons(start: Start) -> None:
    engine = start(block_size=8)
    prompt = list(range(1, 30))
    run(engine, [make_request("a", prompt)])
    run(engine, [make_request("b", prompt)])
    run(engine, [make_request("c", prompt, prompt_logprobs=1)])
    first, second, third = (events_of(engine, name, "admitted")[0] for name in "abc")
    assert (first["missed_never_seen"], first["missed_below_alignment"], first["to_compute"]) == (24, 5, 29)
    assert (second["hit"], second["missed_below_alignment"], second["to_compute"]) == (24, 5, 5)
    assert third["missed_policy"] == 29


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("chunk", [8, 1024])
def test_preemptions_and_recomputed_tokens(start: Start, chunk: int, steps_in_flight: int) -> None:
    sizes = {"kv_cache_memory_bytes": 24 * 4096, "block_size": 4, "max_model_len": 64, "max_num_batched_tokens": chunk}
    engine = start(**sizes, enable_prefix_caching=False, steps_in_flight=steps_in_flight)
    run(engine, [make_request(f"cmpl-{i}-0-0", list(range(i + 1, i + 20)), max_tokens=40) for i in range(4)])
    assert engine.scheduler.work.num_preemptions > 0
    steps = [step for i in range(4) for step in events_of(engine, f"cmpl-{i}")]
    preempted = [step for step in steps if step["what"] == "preempted"]
    assert len(preempted) == engine.scheduler.work.num_preemptions
    assert all(step["tokens_lost"] > 0 and step["mode"] == "recompute" for step in preempted)
    assert sum(step["what"] == "admitted_again" for step in steps) == len(preempted)
    again = [step for step in steps if step["what"] == "recompute"]
    assert {step["request_id"] for step in again} == {step["request_id"] for step in preempted}
    for i in range(4):
        own = events_of(engine, f"cmpl-{i}")
        assert sum(step["what"] == "finished" for step in own) == 1
        decoded = sum(step["tokens"] for step in own if step["what"] == "decode")
        num_prefills = sum(step["what"] in ("prefill", "recompute") for step in own)
        assert 40 - num_prefills <= decoded < 40, own  # a prefill brings a token, unless it is preempted as well
        assert next(step for step in own if step["what"] == "finished")["output_tokens"] == 40
    assert not engine.timelines._prefilling


def test_running_requests_have_events_too(start: Start) -> None:
    engine = start(max_num_seqs=1)
    engine.add(make_request("a", list(range(1, 20)), max_tokens=20))
    engine.add(make_request("b", list(range(1, 20)), max_tokens=20))
    for _ in range(5):
        engine.step()
    [decode] = events_of(engine, "a", "decode")
    assert decode["tokens_so_far"] == 5
    assert kinds_of(engine, "b") == ["queued"]
    assert events_of(engine, "b")[0]["ahead"] == 1
    engine.abort("a")
    assert events_of(engine, "a", "finished")[0]["reason"] == "abort"
    engine.fail(WorkerLost("gone"))
    assert events_of(engine, "b", "finished")[0]["reason"] == "error"


def test_a_lost_rank_is_an_event_of_every_running_request(tiny_model: Path) -> None:
    engine, executor = make_hooked_engine(str(tiny_model), max_num_seqs=1)
    for name in "ab":
        engine.add(make_request(name, [1, 2, 3]))
    engine.step()

    def lose() -> None:
        raise RankLost("rank 1 has ended")

    executor.before_step = lose
    engine.step()
    assert kinds_of(engine, "a")[-2:] == kinds_of(engine, "b")[-2:] == ["rank_lost", "finished"]
    assert events_of(engine, "a", "finished")[0]["reason"] == "error"


def test_a_long_decode_is_a_few_events(start: Start) -> None:
    now_s = time.time()
    engine = start(clock=lambda: now_s)
    engine.add(make_request("a", [1, 2, 3], max_tokens=40))
    while engine.has_work:
        engine.step()
        now_s += 60
        engine.publish()
    runs = events_of(engine, "a", "decode")
    assert 1 < len(runs) < 20
    assert sum(step["tokens"] for step in runs) == 39
    assert runs[-1]["tokens_so_far"] == 40


def test_events_hold_neither_text_nor_token_ids(start: Start) -> None:
    engine = start()
    [whole] = run(engine, [make_request("a", list(range(200, 240)), stop=("zebra",), max_tokens=4)])
    told = json.dumps(events_of(engine, "a"))
    assert whole.text not in told
    assert "zebra" not in told
    assert not any(isinstance(value, (list, tuple, dict)) for step in events_of(engine, "a") for value in step.values())


def test_a_long_timeline_keeps_its_first_and_its_last_events() -> None:
    timeline = Timeline("a", 0.0)
    for i in range(10_000):
        timeline.add("preempted", float(i), tokens=1)
    assert len(timeline.events) <= MAX_EVENTS
    assert timeline.events[0].at_s == 0.0
    assert timeline.events[-1].at_s == 9999.0
    [summed] = [event for event in timeline.events if event.kind == "summed_up"]
    assert summed.facts["steps"] + len(timeline.events) - 1 == 10_000
    assert summed.facts["tokens"] == summed.facts["steps"]
    assert [event.at_s for event in timeline.events] == sorted(event.at_s for event in timeline.events)


def test_the_store_holds_the_last_timelines_in_bounded_memory() -> None:
    num_timelines = MAX_TIMELINES + 200  # these have more than twice the events that are kept
    tracemalloc.start()
    try:
        store = TimelineStore()
        stays = Timeline("stays", 0.0)
        store.begin(stays)
        for i in range(num_timelines):
            timeline = Timeline(f"chatcmpl-{i:024x}-0-0", 0.0)
            store.begin(timeline)
            for k in range(MAX_EVENTS + 40 if i % 10 == 0 else 20):
                timeline.add("preempted", 1e9 + i + k / 7, mode="recompute", tokens=i, seconds=k / 3, steps=i + k)
            store.end(timeline)
        num_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert num_bytes < 4e6  # as objects, the events alone took 14e6
    assert len(store) <= MAX_TIMELINES
    assert sum(len(timeline.events) for timeline in store.newest()) <= MAX_ENDED_EVENTS
    assert store.running() == [stays]
    assert store.of_response(f"chatcmpl-{num_timelines - 1:024x}")
    assert not store.of_response(f"chatcmpl-{0:024x}")


def test_timelines_of_running_requests_are_bounded_as_well() -> None:
    store = TimelineStore(max_timelines=10)
    for i in range(30):
        store.begin(Timeline(str(i), 0.0))
    assert [timeline.request_id for timeline in store.running()] == [str(i) for i in range(20, 30)]
    store.end(Timeline("5", 0.0))
    assert len(store) == 10


def test_a_client_with_many_requests_displaces_its_own() -> None:
    store = TimelineStore(max_timelines=10)
    for client, count in (("victim", 3), ("attacker", 100)):
        for i in range(count):
            timeline = Timeline(f"{client}-{i}", 0.0, client=client)
            store.begin(timeline)
            store.end(timeline)
    assert sorted(timeline.client for timeline in store.newest()) == ["attacker"] * 7 + ["victim"] * 3


class Traced:
    """An engine whose spans stay in memory."""

    def __init__(self, model: Path) -> None:
        self.engine: Engine = make_engine(str(model), block_size=8)
        self.exporter = InMemorySpanExporter()
        config = TracingConfig(endpoint=ENDPOINT, sample_ratio=1.0)
        own = Tracing(config, role="worker", name="w7", exporter=self.exporter)
        self.engine.timelines.exporter = TimelineExporter([RequestSpans(own, "w7")], close_formats=own.close)

    def spans(self) -> tuple[ReadableSpan, ...]:
        """All spans, after the engine's end."""
        self.engine.shutdown()
        return self.exporter.get_finished_spans()


@pytest.fixture
def traced(tiny_model: Path) -> Iterator[Traced]:
    made = Traced(tiny_model)
    yield made
    made.engine.shutdown()


def with_parent(request_id: str, parent: str | None = f"00-{TRACE}-{PARENT}-01", **params: Any) -> Request:
    return replace(make_request(request_id, list(range(1, 30)), **params), trace_parent=parent)


def test_three_spans_one_after_the_other(traced: Traced) -> None:
    run(traced.engine, [with_parent("before", None, max_tokens=2)])
    run(traced.engine, [with_parent("a", max_tokens=6)])
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
    tokens = {"hit": 24, "repaired": 0, "missed_below_alignment": 5}
    assert {name: prefill.attributes[f"transom.tokens.{name}"] for name in tokens} == tokens
    end = {"gen_ai.usage.output_tokens": 6, "transom.preemptions": 0, "transom.finish_reason": "length"}
    assert {name: decode.attributes[name] for name in end} == end
    assert queue.resource.attributes["service.instance.id"] == "worker/w7"


def test_a_request_without_a_parent_gets_a_span_of_its_own(traced: Traced) -> None:
    run(traced.engine, [with_parent("a", None, max_tokens=2)])
    spans = {span.name: span for span in traced.spans()}
    assert spans["request"].parent is None
    for name in ("queue", "prefill", "decode"):
        assert spans[name].parent.span_id == spans["request"].context.span_id


def test_a_request_whose_trace_is_not_sampled_has_no_spans(traced: Traced) -> None:
    run(traced.engine, [with_parent("a", f"00-{TRACE}-{PARENT}-00")])
    assert not traced.spans()


def test_the_last_span_of_a_request_that_failed_says_so(traced: Traced) -> None:
    traced.engine.add(with_parent("a"))
    traced.engine.step()
    traced.engine.add(with_parent("b"))
    traced.engine.fail(WorkerLost("gone"))
    by_request = {(span.attributes["transom.request_id"], span.name): span for span in traced.spans()}
    assert set(by_request) == {("a", "queue"), ("a", "prefill"), ("a", "decode"), ("b", "queue")}
    failed = {key for key, span in by_request.items() if not span.status.is_ok and span.status.description}
    assert failed == {("a", "decode"), ("b", "queue")}


def test_an_unreachable_collector_changes_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.01")  # seconds until the exporter gives up
    [whole] = run(start(otlp_traces_endpoint=ENDPOINT), [with_parent("a", max_tokens=4)])
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
