"""Counts whose labels are known beforehand are there, at 0, on the page of a fresh process, so that rates see the first event."""

from collections.abc import Iterable
from pathlib import Path

from prometheus_client import Metric

from tests.cluster.conftest import make_router
from tests.cluster.stub_worker import StubWorker
from tests.engine_driver import make_engine
from transom_cluster.http.api import build_api
from transom_cluster.telemetry.router_metrics import MAIN_ENDPOINTS


def check(families: Iterable[Metric]) -> None:
    """Every counter and histogram has a series, and nothing is counted: but of ranks, which have warmed up, and CPU time."""
    counters = [one for one in families if one.type in ("counter", "histogram")]
    counters = [one for one in counters if "_rank_" not in one.name and "_process_" not in one.name]
    assert len(counters) > 20
    assert [family.name for family in counters if not family.samples] == []
    assert [sample for family in counters for sample in family.samples if sample.value] == []


def test_a_worker_that_has_just_started(tiny_model: Path) -> None:
    engine = make_engine(str(tiny_model))
    try:
        check(engine.metrics.registry.collect())
    finally:
        engine.shutdown()


def test_a_router_that_has_just_started() -> None:
    router = make_router(StubWorker())
    build_api(router)
    router.metrics.routing.joined("kv", "w")
    check(router.metrics.registry.collect())
    for endpoint in MAIN_ENDPOINTS:
        for status in ("200", "400", "404", "499", "500", "503"):
            labels = {"model": "stub", "router": "r0", "endpoint": endpoint, "status": status}
            assert router.metrics.registry.get_sample_value("transom_router_requests_total", labels) == 0
