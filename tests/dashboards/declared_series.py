"""Every metric by the name that Prometheus shows, with its labels, as the code has them: of a live engine and of a router."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from prometheus_client import Metric

from tests.engine_driver import make_engine
from transom_cluster.telemetry.router_metrics import RouterMetrics
from transom_cluster.telemetry.router_state import RouterState


def declared(model: Path) -> dict[str, set[str]]:
    """Name and labels; a histogram by the name without `_bucket`."""
    engine = make_engine(str(model))
    try:
        return _table([*engine.metrics.registry.collect(), *_router()])
    finally:
        engine.shutdown()


def _router() -> list[Metric]:
    metrics = RouterMetrics("r", model="m")
    state = RouterState(
        num_waiting=0, num_tasks=9, workers_by_state={"open": 1}, in_flight_by_worker={"w": 0}, desired_workers=1
    )
    metrics.watch(lambda: state)
    metrics.finished("/v1/completions", 200, 0.1)
    metrics.routing.joined("kv", "w")
    metrics.routing.mirror_changed("w", num_blocks=0, version=0)
    return list(metrics.registry.collect())


def _table(families: Iterable[Metric]) -> dict[str, set[str]]:
    table: dict[str, set[str]] = {}
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels}
        table.setdefault(name, set()).update(labels - {"le"})
    return table
