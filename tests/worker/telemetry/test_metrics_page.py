"""The whole page of a worker: its series from the start, their values after known requests, and both formats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.engine_driver import make_engine, make_request, run
from transom_core.contract import FinishReason
from transom_worker.engine.engine import Engine
from transom_worker.kvcache.blocks.allocator import EVICTED_FOR_OTHER_GROUP, EVICTED_FOR_OWN_GROUP
from transom_worker.kvcache.prefix import prefix_outcome
from transom_worker.kvcache.prefix.tree import CheckpointKind
from transom_worker.telemetry.engine_events import EngineEvents, RequestTimes
from transom_worker.telemetry.metrics import EngineMetrics, cache, requests

OWN = {"model", "worker"}
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = make_engine(str(tiny_model), max_num_seqs=2)
    yield engine
    engine.shutdown()


def series(families: list[Metric]) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {(sample.name, tuple(sorted(sample.labels.items()))) for family in families for sample in family.samples}


def values(engine: Engine, name: str) -> dict[tuple[str, ...], float]:
    """A family's samples by its own labels' values."""
    samples = [sample for family in engine.metrics.registry.collect() for sample in family.samples]
    return {
        tuple(value for label, value in sample.labels.items() if label not in OWN): sample.value
        for sample in samples
        if sample.name == name
    }


def test_every_family_has_samples_before_the_first_request(engine: Engine) -> None:
    """A test of docs/metrics.md has their names and labels."""
    for family in engine.metrics.registry.collect():
        assert family.samples, family.name
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
    run(engine, [make_request(name, list(range(5, 45)), max_tokens=6) for name in ("first",)])
    run(engine, [make_request(name, list(range(5, 45)), max_tokens=6) for name in ("second",)])
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
