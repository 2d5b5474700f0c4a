"""The router's own series: there from the start, labelled, and gone with their worker."""

import asyncio
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.conftest import Api, make_router, running, running_api, sample, timings, until
from tests.cluster.stub_worker import StubDirectory, StubWorker
from transom_cluster.telemetry.router_metrics import MAX_EXEMPLAR_CHARS, RouterMetrics
from transom_core.config import AutoscalingConfig
from transom_core.contract import Request, SamplingParams, WorkerLoad

SCALING = AutoscalingConfig(
    min_replicas=0, max_replicas=8, first_token_objective_s=1.0, upscale_delay_s=1.0, downscale_delay_s=1.0
)


def changes(api: Api) -> list[float | None]:
    kinds = ("joined", "lost", "drained")
    return [sample(api.router, "worker_changes_total", change=kind) for kind in kinds]


def test_every_series_has_model_and_router() -> None:
    router = make_router(StubWorker())
    families = {family.name: family for family in text_string_to_metric_families(router.metrics.text())}
    for family in families.values():
        for one in family.samples:
            assert {"model": "stub", "router": "r0"}.items() <= one.labels.items(), one
            assert not one.name.endswith("_created")
    for name, least in (("process_cpu_seconds_total", 0), ("process_resident_bytes", 1e6)):
        found = sample(router, name)
        assert found is not None
        assert found > least
    (build,) = families["transom_build_info"].samples
    assert {"version", "python", "ray"} <= build.labels.keys()
    assert build.value == 1
    assert "transom_router_desired_workers" not in families


async def test_in_flight_requests_by_worker() -> None:
    async with running_api(StubWorker(max_events=1)) as api:
        assert sample(api.router, "in_flight_requests", worker="w0") == 0
        request = Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams(max_tokens=9), seed=0)
        async with api.router.generate([request]) as output:
            await output.next()
            assert sample(api.router, "in_flight_requests", worker="w0") == 1
        assert sample(api.router, "in_flight_requests", worker="w0") == 0


async def test_workers_join_and_are_lost_or_drained() -> None:
    async with running_api(StubWorker(worker="w0"), StubWorker(worker="w1")) as api:
        assert changes(api) == [2, 0, 0]
        assert sample(api.router, "placements_total", policy="kv", worker="w0", reason="home") == 0
        api.worker.die()
        await until(lambda: changes(api)[0] == 3)
        assert changes(api) == [3, 1, 0]
        api.directory.remove(api.worker)
        await until(lambda: "w0" not in api.router.connections)
        assert changes(api) == [3, 1, 1]
        assert 'worker="w0"' not in api.router.metrics.text()
        assert 'worker="w1"' in api.router.metrics.text()


@pytest.mark.parametrize("stream_breaks", ["first", "at last", "never"])
async def test_a_crash_is_a_loss_whatever_the_router_hears_of_first(stream_breaks: str) -> None:
    async with running_api(StubWorker(worker="w0"), StubWorker(worker="w1")) as api:
        api.worker.is_dead, api.worker.can_open = True, False
        if stream_breaks == "first":
            api.worker.die()
            await until(lambda: changes(api) == [2, 1, 0])
        api.directory.remove(api.worker)
        await until(lambda: api.router.connections["w0"].is_draining)
        if stream_breaks == "at last":
            api.worker.die()
        await until(lambda: "w0" not in api.router.connections)
        assert changes(api) == [2, 1, 0]
        assert sample(api.router, "drains_total", outcome="finished") == 0


async def test_a_leaving_worker_that_does_not_answer_is_lost() -> None:
    """Its host is gone: calls to it do not fail, they hang."""
    impatient = timings(last_call_timeout_s=0.01)
    async with running_api(StubWorker(worker="w0"), StubWorker(worker="w1"), timings=impatient) as api:
        api.worker.info = asyncio.Event().wait  # type: ignore[assignment,method-assign]
        api.directory.remove(api.worker)
        await until(lambda: "w0" not in api.router.connections)
        assert changes(api) == [2, 1, 0]


async def test_tasks_are_counted_and_fall_back_when_requests_have_ended() -> None:
    async with running_api(StubWorker(worker="w0")) as api:
        await api.complete()
        before = sample(api.router, "tasks")
        other = asyncio.create_task(asyncio.Event().wait())
        assert sample(api.router, "tasks") == (before or 0) + 1
        other.cancel()
        for _ in range(5):
            await api.complete()
        await until(lambda: sample(api.router, "tasks") == before)


async def test_desired_workers_follow_the_loads_and_the_line() -> None:
    busy = StubWorker(load=WorkerLoad(max_num_seqs=10, num_running=27, num_waiting=0))
    directory = StubDirectory()
    async with running(make_router(directory=directory, autoscaling=SCALING), 0) as router:
        assert sample(router, "desired_workers") == 0
        directory.add(busy)
        await until(lambda: sample(router, "workers", state="open") == 1)
        assert sample(router, "desired_workers") == 3
        router.connections["w0"].load = replace(busy.load, num_running=0)
        assert sample(router, "desired_workers") == 0


def test_long_request_ids_make_no_exemplar() -> None:
    metrics = RouterMetrics("r0", model="stub")
    metrics.finished("/v1/completions", 200, 0.5, request_id="x" * (MAX_EXEMPLAR_CHARS + 1))
    metrics.first_token(0.5, "é" * MAX_EXEMPLAR_CHARS)
    assert "xxx" not in metrics.text(openmetrics=True)
    assert "é" * MAX_EXEMPLAR_CHARS in metrics.text(openmetrics=True)
