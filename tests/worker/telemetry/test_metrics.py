"""A worker's metrics page after known requests: every count adds up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine_driver import make_engine, make_request, run, unusable_request
from transom_core.clock import steady_time_s
from transom_core.contract import WorkerLoad
from transom_worker.engine.engine import Engine
from transom_worker.engine.engine_thread import EngineThread
from transom_worker.kvcache.histogram import Histogram
from transom_worker.kvcache.stats import CacheStats, CheckpointStats, GroupStats
from transom_worker.scheduling.work_counts import WorkCounts
from transom_worker.telemetry.engine_events import EngineEvents
from transom_worker.telemetry.metrics import EngineMetrics
from transom_worker.telemetry.worker_state import WorkerState

GIVE_UP_S = 120
Page = dict[str, list[tuple[dict[str, str], float]]]


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = make_engine(str(tiny_model), max_num_seqs=1)
    yield engine
    engine.shutdown()


def page(engine: Engine | EngineMetrics) -> Page:
    samples: Page = {}
    metrics = engine if isinstance(engine, EngineMetrics) else engine.metrics
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def total(engine: Engine | EngineMetrics, name: str, **labels: str) -> float:
    return sum(value for found, value in page(engine).get(name, []) if labels.items() <= found.items())


def test_counts_of_finished_requests(engine: Engine) -> None:
    run(engine, [make_request(f"r{i}", list(range(5, 45)), max_tokens=6) for i in range(3)])
    assert total(engine, "transom_requests_total", finish_reason="length") == 3
    assert total(engine, "transom_prompt_tokens_total") == 120
    assert total(engine, "transom_output_tokens_total") == 18
    for name in ("request", "queue", "prefill", "first_token", "decode"):
        assert total(engine, f"transom_{name}_seconds_count") == 3, name
    assert total(engine, "transom_inter_token_seconds_count") == 15
    assert total(engine, "transom_prefix_tokens_total", outcome="hit") == 64  # two blocks of 16, twice
    assert total(engine, "transom_requests_running") == total(engine, "transom_requests_waiting") == 0


def test_times_of_a_request_begin_at_this_worker(engine: Engine) -> None:
    """It came to its router decades ago, and may have migrated since then."""
    for name, resumed in (("anew", []), ("resumed", [9])):
        request = make_request(name, [5, 6, 7], resumed=resumed, max_tokens=4)
        run(engine, [replace(request, waited_s=1e9)])
    for name in ("request", "queue", "first_token"):
        buckets = page(engine)[f"transom_{name}_seconds_bucket"]
        assert max(value for labels, value in buckets if labels["le"] == "1800.0") == 2, name
        assert total(engine, f"transom_{name}_seconds_count") == 2, name


def test_outcomes_sum_to_the_prompt_tokens_on_every_page(engine: Engine) -> None:
    """At every scrape, also between two publications of the state."""
    pages = []
    for i in range(4):
        engine.add(make_request(f"r{i}", list(range(5, 45 + i)), max_tokens=3))
    while engine.has_work:
        engine.step()
        pages.append((total(engine, "transom_prompt_tokens_total"), total(engine, "transom_prefix_tokens_total")))
    assert all(prompt == outcomes for prompt, outcomes in pages)
    assert pages[-1] == (166, 166)


def test_the_page_shows_how_long_the_oldest_queued_request_waits(engine: Engine) -> None:
    """One that has not begun is in no histogram."""
    engine.add(make_request("runs", [5, 6, 7], max_tokens=3))
    engine.add(make_request("waits", [5, 6, 7], max_tokens=3), arrival_s=steady_time_s() - 1000)
    engine.add(make_request("came later", [5, 6, 7], max_tokens=3), arrival_s=steady_time_s() - 500)
    engine.step()
    engine.publish()
    assert total(engine, "transom_queue_seconds_count") == 1
    assert total(engine, "transom_queue_oldest_seconds") >= 1000
    engine.abort("waits")
    engine.publish()
    assert 500 <= total(engine, "transom_queue_oldest_seconds") < 1000
    while engine.has_work:
        engine.step()
    assert total(engine, "transom_queue_oldest_seconds") == 0


def test_refused_requests_are_counted_by_reason(tiny_model: Path) -> None:
    engine = make_engine(str(tiny_model), max_num_seqs=1, max_waiting=0)
    thread = EngineThread(engine, lambda _: None)
    try:
        thread.submit([make_request("long", [5] * 10_000)]).result(GIVE_UP_S)
        thread.submit([make_request(f"r{i}", [5, 6], max_tokens=1000) for i in range(3)]).result(GIVE_UP_S)
        thread.submit([unusable_request("unusable")]).result(GIVE_UP_S)
        thread.call(lambda: engine.fail(ValueError("a bug"))).result(GIVE_UP_S)
        thread.submit([make_request("late", [5])]).result(GIVE_UP_S)
    finally:
        thread.shutdown()
    refused = {labels["reason"]: count for labels, count in page(engine)["transom_requests_refused_total"]}
    assert refused == {"request_refused": 1, "overloaded": 2, "worker_unavailable": 1, "internal_error": 1}
    limits = {labels["kind"]: limit for labels, limit in page(engine)["transom_requests_limit"]}
    assert limits == {"running": 1, "waiting": 0}


def test_preempted_requests_count_once(tiny_model: Path) -> None:
    engine = make_engine(
        str(tiny_model), kv_cache_memory_bytes=300 << 10, block_size=8, max_model_len=256, max_num_seqs=8
    )
    run(engine, [make_request(f"r{i}", [40 + i] * 60, max_tokens=24) for i in range(8)])
    assert engine.scheduler.work.num_preemptions > 0
    assert total(engine, "transom_preemptions_total", mode="recompute") == engine.scheduler.work.num_preemptions
    assert total(engine, "transom_prompt_tokens_total") == total(engine, "transom_prefix_tokens_total") == 480
    assert total(engine, "transom_queue_seconds_count") == total(engine, "transom_prefill_seconds_count") == 8
    engine.shutdown()


def test_the_page_has_fragmentation_checkpoints_and_residency() -> None:
    times = Histogram()
    times.observe(2.0, 5)
    times.observe(1e6)
    group = GroupStats(
        name="full",
        block_bytes=100,
        active_blocks=3,
        cached_blocks=5,
        free_blocks=2,
        pinned_blocks=4,
        residency=times.stats(),
    )
    metrics = EngineMetrics()
    stats = CacheStats(
        num_pages=4,
        free_pages=2,
        page_bytes=500,
        groups=(group,),
        outcome_tokens={"repaired": 9},
        waste=0.01,
        checkpoints=CheckpointStats(current={"prompt": 4, "fork": 2}),
        num_compacted_blocks=7,
    )
    EngineEvents(*metrics.sinks).published(WorkerState(stats=stats, load=WorkerLoad(), work=WorkCounts()))
    assert total(metrics, "transom_kv_fragmentation_ratio") == 0.2
    assert total(metrics, "transom_kv_waste_ratio") == 0.01
    assert total(metrics, "transom_kv_checkpoints", kind="prompt") == 4
    assert total(metrics, "transom_kv_checkpoints") == 6
    assert total(metrics, "transom_kv_compacted_blocks_total") == 7
    assert total(metrics, "transom_kv_held_blocks", group="full") == 4
    assert total(metrics, "transom_prefix_tokens_total", outcome="repaired") == 9
    residency = {
        labels["le"]: value
        for labels, value in page(metrics)["transom_kv_residency_seconds_bucket"]
        if labels["group"] == "full"
    }
    assert [residency[bound] for bound in ("1.0", "3.0", "43200.0", "+Inf")] == [0, 5, 5, 6]
    assert total(metrics, "transom_kv_residency_seconds_count") == 6
    assert total(metrics, "transom_kv_residency_seconds_sum") == 1_000_010
    assert total(metrics, "transom_kv_reuse_interval_seconds_count", group="full") == 0
