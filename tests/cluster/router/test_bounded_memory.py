"""Days of traffic: nothing in a router grows with the number of requests, clients or workers that it has ever seen."""

import asyncio

import pytest

from tests.cluster.conftest import Api, running_api, timings, until
from tests.cluster.stub_worker import StubWorker
from tests.container_sizes import container_sizes, growth
from tests.how_many import num_examples
from transom_core.config import LimitsConfig
from transom_core.contract import ErrorInfo
from transom_core.errors import Overloaded
from transom_core.telemetry import request_timelines

AT_ONCE = 20
NUM_REQUESTS = num_examples(daily=300, exhaustive=50_000)
NUM_KEYS = 50


async def serve(api: Api, begin: int, end: int) -> None:
    """Requests of many clients: complete, wrong, refused; and workers that come and go."""
    for first in range(begin, end, AT_ONCE):
        worker = StubWorker(
            worker=f"w-{first}", admission_error=ErrorInfo.of(Overloaded("full")) if first % 3 else None
        )
        api.directory.add(worker)
        await until(lambda: sum(one.takes_requests for one in api.router.connections.values()) == 2)
        calls = []
        for number in range(first, first + AT_ONCE):
            headers = {"authorization": f"Bearer key-{number % NUM_KEYS}", "x-request-id": f"from-client-{number}"}
            body = {"prompt": f"{number}", "max_tokens": 1 if number % 5 else -1, "cache_salt": f"salt {number}"}
            calls.append(api.client.post("/v1/completions", json=body, headers=headers))
        await asyncio.gather(*calls)
        await api.client.get(f"/unknown/{first}")
        api.directory.remove(worker)
        await until(lambda: len(api.router.connections) == 1)
        api.router.metrics.text()


async def test_a_router_does_not_grow_with_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    init = request_timelines.TimelineStore.__init__
    monkeypatch.setattr(
        request_timelines.TimelineStore, "__init__", lambda store: init(store, max_timelines=100, max_ended_events=200)
    )
    keys = tuple(f"key-{number}" for number in range(NUM_KEYS))
    limits = LimitsConfig(requests_per_minute=10**6, concurrent_requests=1000, request_timeout_s=3600.0)
    async with running_api(api_keys=keys, limits=limits, timings=timings(drain_s=0.0)) as api:
        await serve(api, 0, NUM_REQUESTS)
        api.worker.submitted.clear()
        before = container_sizes(api.router)
        await serve(api, NUM_REQUESTS, 3 * NUM_REQUESTS)
        api.worker.submitted.clear()
        assert growth(before, container_sizes(api.router), least=2 * NUM_REQUESTS // AT_ONCE // 2) == {}
