"""A worker's metrics: its series from the start, their values after known requests, and the page in both formats.

With `--metrics-compat vllm` the merged page answers the queries of the Grafana boards that vLLM publishes.
"""

from dataclasses import replace
from typing import get_args

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.engine_driver import WAIT_S, OnThread, drain, make_request, run, unusable_request
from tests.worker.conftest import Start
from transom_cluster.telemetry.merge_metrics import merge_pages
from transom_cluster.telemetry.router_metrics import RouterMetrics
from transom_core.clock import steady_time_s
from transom_core.contract import FinishReason
from transom_worker.engine.engine import Engine
from transom_worker.kvcache.blocks.allocator import EVICTED_FOR_OTHER_GROUP, EVICTED_FOR_OWN_GROUP
from transom_worker.kvcache.prefix import prefix_outcome
from transom_worker.kvcache.prefix.tree import CheckpointKind
from transom_worker.telemetry.engine_events import EngineEvents, RequestTimes
from transom_worker.telemetry.metrics import cache, requests
from transom_worker.telemetry.metrics.engine_metrics import EngineMetrics

OWN = {"model", "worker"}
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
# Of examples/observability/prometheus_grafana/grafana.json and vllm_overview.json: the series that their queries name.
HISTOGRAMS = {
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_prompt_tokens", "request_generation_tokens"),
    *("request_max_num_generation_tokens", "iteration_tokens_total"),
}
WANTED = {
    **{f"vllm:{name}_{end}": 2 for name in HISTOGRAMS for end in ("count", "bucket")},
    **{"vllm:prompt_tokens_total": 80, "vllm:generation_tokens_total": 10, "vllm:request_success_total": 2},
    **{"vllm:prefix_cache_queries_total": 80, "vllm:prefix_cache_hits_total": 32, "vllm:num_preemptions_total": 0},
    **{"vllm:num_requests_running": 0, "vllm:num_requests_waiting": 0, "vllm:kv_cache_usage_perc": 0},
}


@pytest.fixture
def engine(start: Start) -> Engine:
    return start(max_num_seqs=1)


def values(engine: Engine | EngineMetrics, name: str) -> dict[tuple[str, ...], float]:
    """A family's samples by its own labels' values."""
    metrics = engine if isinstance(engine, EngineMetrics) else engine.metrics
    return {
        tuple(value for label, value in sample.labels.items() if label not in OWN): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def total(engine: Engine | EngineMetrics, name: str, label: str = "") -> float:
    """The sum of a family's samples, or of those that have a label's value."""
    return sum(value for labels, value in values(engine, name).items() if not label or label in labels)


def test_times_of_a_request_begin_at_this_worker(engine: Engine) -> None:
    """It came to its router decades ago, and may have migrated since then."""
    for name, resumed in (("anew", []), ("resumed", [9])):
        run(engine, [replace(make_request(name, [5, 6, 7], resumed=resumed, max_tokens=4), waited_s=1e9)])
    for name in ("request", "queue", "first_token"):
        assert total(engine, f"transom_{name}_seconds_bucket", "1800.0") == 2, name
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
    drain(engine)
    assert total(engine, "transom_queue_oldest_seconds") == 0


def test_refused_requests_are_counted_by_reason(start: Start) -> None:
    on_thread = OnThread(start(max_num_seqs=1, max_waiting=0))
    engine = on_thread.engine
    on_thread.submit(make_request("long", [5] * 10_000))
    on_thread.submit(*(make_request(f"r{i}", [5, 6], max_tokens=1000) for i in range(3)))
    on_thread.submit(unusable_request("unusable"))
    on_thread.thread.call(lambda: engine.fail(ValueError("a bug"))).result(WAIT_S)
    on_thread.submit(make_request("late", [5]))
    on_thread.thread.shutdown()
    counts = {"request_refused": 1, "overloaded": 2, "worker_unavailable": 1, "internal_error": 1}
    assert values(engine, "transom_requests_refused_total") == {(reason,): count for reason, count in counts.items()}
    assert values(engine, "transom_requests_limit") == {("running",): 1, ("waiting",): 0}


def test_preempted_requests_count_once(start: Start) -> None:
    engine = start(kv_cache_memory_bytes=300 << 10, block_size=8, max_model_len=256, max_num_seqs=8)
    run(engine, [make_request(f"r{i}", [40 + i] * 60, max_tokens=24) for i in range(8)])
    assert engine.scheduler.work.num_preemptions > 0
    assert total(engine, "transom_preemptions_total", "recompute") == engine.scheduler.work.num_preemptions
    assert total(engine, "transom_prompt_tokens_total") == total(engine, "transom_prefix_tokens_total") == 480
    assert total(engine, "transom_queue_seconds_count") == total(engine, "transom_prefill_seconds_count") == 8


def series(families: list[Metric]) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {(sample.name, tuple(sorted(sample.labels.items()))) for family in families for sample in family.samples}


def test_every_family_has_samples_before_the_first_request(engine: Engine) -> None:
    """Nothing is counted but of ranks, which have warmed up, and CPU time."""
    for family in engine.metrics.registry.collect():
        assert family.samples, family.name
        if family.type in ("counter", "histogram") and "_rank_" not in family.name and "_process_" not in family.name:
            assert not any(sample.value for sample in family.samples), family.name
        assert all(set(sample.labels) >= OWN for sample in family.samples), family.name
        assert family.documentation[0].isupper()
        assert family.documentation.endswith(".")


def test_traffic_adds_no_series(engine: Engine) -> None:
    """Every label value is known beforehand, so that rates see the first event and cardinality is bounded."""
    before = series(list(engine.metrics.registry.collect()))
    run(engine, [make_request(f"r{i}", list(range(5, 45 + i)), max_tokens=6) for i in range(5)])
    engine.add(make_request("left", [5, 6, 7]))
    engine.abort("left")
    assert series(list(engine.metrics.registry.collect())) == before


def test_values_of_a_small_run(engine: Engine) -> None:
    for name in ("first", "second"):
        run(engine, [make_request(name, list(range(5, 45)), max_tokens=6)])
    assert values(engine, "transom_prefix_requests_total") == {("hit",): 1, ("repaired",): 0, ("missed",): 1}
    tokens = values(engine, "transom_prefix_tokens_total")
    assert tokens["hit", ""] == 32
    assert tokens["missed", "never_seen"] == 32
    assert tokens["missed", "below_alignment"] == 16
    assert sum(tokens.values()) == 80
    phases = values(engine, "transom_computed_tokens_total")
    lengths = {name: values(engine, f"transom_request_{name}_tokens_bucket") for name in ("prompt", "output")}
    assert [lengths["prompt"][le,] for le in ("32.0", "64.0", "+Inf")] == [0, 2, 2]
    assert [lengths["output"][le,] for le in ("4.0", "16.0", "+Inf")] == [0, 2, 2]
    assert phases == {("prefill",): 48, ("decode",): 10, ("repair",): 0, ("recompute",): 0}
    assert values(engine, "transom_step_rows_total") == {("prefill",): 2, ("decode",): 10}
    assert values(engine, "transom_steps_total") == {(): 12}
    changes = values(engine, "transom_kv_checkpoint_changes_total")
    assert changes["prompt", "placed"] >= 1
    assert sum(count for (_, change), count in changes.items() if change == "hit") == 1
    placed = sum(count for (_, change), count in changes.items() if change == "placed")
    assert placed == sum(values(engine, "transom_kv_checkpoints").values())  # none was given up
    assert values(engine, "transom_load_decode_step_seconds")[()] > 0
    assert total(engine, "transom_requests_total", "length") == 2
    for name in ("request", "queue", "prefill", "first_token", "decode"):
        assert total(engine, f"transom_{name}_seconds_count") == 2, name
    assert total(engine, "transom_inter_token_seconds_count") == 10
    assert total(engine, "transom_requests_running") == total(engine, "transom_requests_waiting") == 0
    assert values(engine, "transom_worker_start_seconds")[()] > 0


def test_ranks_memory_and_headroom(engine: Engine) -> None:
    run(engine, [make_request("a", list(range(5, 45)), max_tokens=6)])
    memory = values(engine, "transom_rank_memory_bytes")
    assert memory["0", "weights"] == engine.info.memory.weight_bytes > 0
    assert memory["0", "kv"] == engine.info.memory.kv_bytes > 0
    assert ("0", "other") in memory
    assert 0 < values(engine, "transom_rank_forward_seconds_total")["0",] == pytest.approx(engine.forward_s)
    assert values(engine, "transom_rank_busy_seconds_total")["0",] > engine.forward_s
    (info,) = values(engine, "transom_rank_info")
    assert info[:2] == ("0", "cpu")
    stats = engine.scheduler.stats()
    assert values(engine, "transom_kv_pool_bytes") == {(): stats.num_pages * stats.page_bytes}
    headroom = values(engine, "transom_kv_headroom_requests")
    assert headroom["max",] >= 1  # what is cached can be evicted
    assert all(headroom[length] >= headroom["max",] for length in headroom)


def test_both_formats_parse_and_openmetrics_has_exemplars(engine: Engine) -> None:
    request = make_request("chatcmpl-1", list(range(5, 45)), max_tokens=6)
    run(engine, [replace(request, trace_parent=f"00-{TRACE_ID}-b7ad6b7169203331-01")])
    text = engine.metrics.text().decode()
    assert "chatcmpl-1" not in text
    names = {family.name for family in engine.metrics.registry.collect()}
    assert {family.name for family in parse_text(text)} == names
    families = {family.name: family for family in parse_openmetrics(engine.metrics.text(openmetrics=True).decode())}
    assert set(families) == names
    for name in ("request", "queue", "prefill", "first_token"):
        exemplars = [sample.exemplar for sample in families[f"transom_{name}_seconds"].samples if sample.exemplar]
        assert [one.labels for one in exemplars] == [{"request_id": "chatcmpl-1", "trace_id": TRACE_ID}], name


@pytest.mark.parametrize("request_id", ["", 'a "b" # {c} \\ \n\ud800é' * 30, "x" * 500])
@pytest.mark.parametrize("trace_parent", [None, "nonsense", f"00-{TRACE_ID}-b7ad6b7169203331-01"])
def test_whatever_an_id_is_the_page_stays_whole(request_id: str, trace_parent: str | None) -> None:
    metrics = EngineMetrics()
    times = RequestTimes(1.0, request_id=request_id, trace_parent=trace_parent)
    times.scheduled_s = 2.0
    EngineEvents(*metrics.sinks).first_scheduled(times, num_prompt_tokens=3)
    families = {family.name: family for family in parse_openmetrics(metrics.text(openmetrics=True).decode())}
    exemplars = [sample.exemplar for sample in families["transom_queue_seconds"].samples if sample.exemplar]
    labels = exemplars[0].labels if exemplars else {}
    assert labels.get("trace_id") == (TRACE_ID if trace_parent and TRACE_ID in trace_parent else None)
    assert ("request_id" in labels) == bool(request_id)


def test_fixed_label_values_are_those_of_the_code() -> None:
    assert set(requests.FINISH_REASONS) == {*get_args(FinishReason), "handover"}
    assert set(cache.CHECKPOINT_KINDS) == {kind.value for kind in CheckpointKind}
    missed = {name for name in vars(prefix_outcome).values() if isinstance(name, str) and name.startswith("missed_")}
    assert {f"missed_{reason}" for reason in cache.MISS_REASONS} == missed
    assert {EVICTED_FOR_OWN_GROUP, EVICTED_FOR_OTHER_GROUP} < set(cache.EVICTION_REASONS)
    assert set(cache.HIT_OUTCOMES) == {prefix_outcome.HIT, prefix_outcome.REPAIRED, prefix_outcome.MISSED}


@pytest.mark.parametrize("openmetrics", [False, True])
def test_the_queries_of_vllms_boards_find_their_series(start: Start, openmetrics: bool) -> None:
    engine = start(metrics_compat="vllm", max_num_seqs=1, block_size=16)
    run(engine, [make_request(f"r{i}", list(range(5, 45)), max_tokens=5) for i in range(2)])
    router = RouterMetrics("r7", model=engine.config.model.model, compat="vllm")
    for request in ("r0", "r1"):
        router.first_token(0.1, request)
        router.inter_token_s.observe(0.01)
        router.finished("/v1/messages", 200, 1.0)
        router.finished("/metrics", 200, 9.0)
    pages = [router.text(openmetrics=openmetrics), engine.metrics.text(openmetrics=openmetrics).decode()]
    page = merge_pages(pages, openmetrics=openmetrics)
    families: list[Metric] = list((parse_openmetrics if openmetrics else parse_text)(page))
    found: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples if sample.name.startswith("vllm:")):
        assert (sample.labels.pop("model_name"), sample.labels.pop("engine")) in {
            (engine.config.model.model, "0"),
            (engine.config.model.model, "r7"),
        }
        if sample.labels.pop("le", "+Inf") == "+Inf":
            found[sample.name] = found.get(sample.name, 0) + sample.value
        assert sample.labels.keys() <= {"finished_reason"}
    assert found.pop("vllm:iteration_tokens_total_count") == found.pop("vllm:iteration_tokens_total_bucket") > 2
    assert {name: value for name, value in found.items() if not name.endswith("_sum")} == {
        name: value for name, value in WANTED.items() if "iteration" not in name
    }
    assert "vllm:" not in RouterMetrics("r7").text()
