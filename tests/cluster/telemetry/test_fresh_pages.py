"""Counts whose labels are known beforehand are there, at 0, on the page of a fresh process, so that rates see the first event."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from pathlib import Path

from prometheus_client import Metric

from tests.cluster.conftest import make_router
from tests.cluster.stub_worker import StubWorker
from tests.engine_driver import make_engine
from transom_cluster.http.api import build_api
from transom_cluster.routing.policy import REASONS
from transom_cluster.telemetry.request_outcome import BREAK_REASONS
from transom_cluster.telemetry.router_metrics import MAIN_ENDPOINTS
from transom_core.errors import LOSS_CAUSES
from transom_worker.telemetry.metrics.cache import (
    CHECKPOINT_KINDS,
    EVICTION_REASONS,
    HIT_OUTCOMES,
    HOST_EVICTION_REASONS,
    MISS_REASONS,
)
from transom_worker.telemetry.metrics.requests import FINISH_REASONS, REFUSALS
from transom_worker.telemetry.metrics.requests import OUTCOMES as TRANSFER_OUTCOMES
from transom_worker.telemetry.metrics.steps import STEP_PARTS

Values = set[tuple[str, ...]]
OWN = {"model", "worker", "router"}


def one(*values: str) -> Values:
    """The values of a family's only label."""
    return {(value,) for value in values}


OF_WORKERS: dict[str, Values] = {
    "transom_requests": one(*FINISH_REASONS),
    "transom_request_seconds": one(*FINISH_REASONS),
    "transom_requests_refused": one(*REFUSALS),
    "transom_step_seconds": one(*STEP_PARTS),
    "transom_computed_tokens": one("prefill", "decode", "repair", "recompute"),
    "transom_step_rows": one("prefill", "decode"),
    "transom_decode_steps": set(product(("0",), ("eager", "replayed"))),
    "transom_prefix_tokens": {("hit", ""), ("repaired", ""), *(("missed", reason) for reason in MISS_REASONS)},
    "transom_prefix_requests": one(*HIT_OUTCOMES),
    "transom_kv_checkpoint_changes": set(product(CHECKPOINT_KINDS, ("placed", "given_up", "windows_given_up", "hit"))),
    "transom_preemptions": one(*("recompute", "swap")),
    "transom_preempted_tokens": one(*("recompute", "swap")),
    "transom_kv_host_moved_blocks": set(product(("full",), ("spilled", "swapped", "imported", "loaded"))),
    "transom_kv_host_evicted_blocks": set(product(("full",), HOST_EVICTION_REASONS)),
    "transom_kv_evicted_blocks": set(product(("full",), EVICTION_REASONS)),
    "transom_kv_residency_seconds": one("full"),
    "transom_kv_reuse_interval_seconds": one("full"),
    "transom_kv_transfers": set(TRANSFER_OUTCOMES),
    "transom_kv_transfer_bytes": one("in", "out"),
    "transom_grammar_compiles": one("compiled", "cached"),
    "transom_disk_blocks": set(
        product(("0",), ("written", "read", "missing", "broken", "dropped", "failed", "evicted"))
    ),
    **dict.fromkeys(
        (
            "transom_kv_policy_requests",
            "transom_kv_policy_dropped_blocks",
            "transom_kv_policy_compared_tokens",
            "transom_kv_policy_agreeing_tokens",
            "transom_kv_policy_kl_nats",
            "transom_kv_policy_dropped_attention",
        ),
        one("window", "adaptive", "heavy"),
    ),
}
OF_ROUTERS: dict[str, Values] = {
    "transom_router_broken_answers": set(product(MAIN_ENDPOINTS, BREAK_REASONS)),
    "transom_router_request_seconds": one(*MAIN_ENDPOINTS),
    "transom_router_failovers": one("resumed", "gave_up", "poison"),
    "transom_router_worker_losses": one(*LOSS_CAUSES),
    "transom_router_suspects": one("suspected", "released", "cleared", "culprit"),
    "transom_router_drains": one("finished", "moved"),
    "transom_router_worker_changes": one("joined", "lost", "drained"),
    "transom_router_dropped_scrapes": one("worker", "router"),
    "transom_router_placements": set(product(("kv",), ("w",), REASONS["kv"])),
    "transom_router_resyncs": one("w"),
    "transom_router_tool_calls": set(product(("hermes",), ("parsed", "malformed", "incomplete"))),
    "transom_router_degraded_answers": one("hermes"),
    "transom_router_predicted_hit_tokens": one("device", "host", "disk", "peer"),
    "transom_router_actual_hit_tokens": one("device", "host", "disk", "peer"),
}
STATUSES = "transom_router_requests"  # by endpoint


def counted(families: Iterable[Metric]) -> dict[str, dict[tuple[str, ...], float]]:
    """What counters and histograms with labels of their own have counted, by these labels' values."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in families:
        for sample in family.samples if family.type in ("counter", "histogram") else ():
            by_router = "router" in sample.labels
            values = {k: v for k, v in sample.labels.items() if k not in (OWN - {"worker"} if by_router else OWN)}
            if values and "le" not in values and not sample.name.endswith("_sum"):
                found.setdefault(family.name, {})[tuple(values.values())] = sample.value
    return found


def check(found: dict[str, dict[tuple[str, ...], float]], expected: dict[str, Values]) -> None:
    """Every family, each combination of its labels, nothing counted. A family that is new has to be added above."""
    assert {name: set(counts) for name, counts in found.items()} == expected
    assert not any(count for counts in found.values() for count in counts.values())


def test_a_worker_that_has_just_started(tiny_model: Path) -> None:
    engine = make_engine(str(tiny_model))
    try:
        found = counted(engine.metrics.registry.collect())
        ranks = {name: found.pop(name) for name in list(found) if "_rank_" in name}  # which have warmed up
        check(found, OF_WORKERS)
        assert all(labels[0] == "0" for counts in ranks.values() for labels in counts)
        assert {"transom_rank_forward_seconds", "transom_rank_busy_seconds"} <= ranks.keys()
    finally:
        engine.shutdown()


def test_a_router_that_has_just_started() -> None:
    router = make_router(StubWorker())
    build_api(router)
    router.metrics.routing.joined("kv", "w")
    found = counted(router.metrics.registry.collect())
    statuses = found.pop(STATUSES)
    check(found, OF_ROUTERS)
    assert not any(statuses.values())
    for endpoint in MAIN_ENDPOINTS:
        assert {status for path, status in statuses if path == endpoint} >= {"200", "400", "404", "499", "500", "503"}
