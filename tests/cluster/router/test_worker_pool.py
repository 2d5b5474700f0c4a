"""Several workers: they come, fill up, drain and go; requests wait, spill over or move, and the server's routes say so."""

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import replace

import pytest

from tests.cluster.conftest import PATIENT, make_router, num_in_flight, running, running_api, sample, timings, until
from tests.cluster.stub_worker import StubDirectory, StubWorker, stub_workers
from transom_cluster.router.in_flight_requests import InFlightRequest
from transom_cluster.router.output_stream import OutputStream
from transom_cluster.routing.placer import PlacementDecision, Placer
from transom_core.config import FailoverConfig, LimitsConfig, PriorityConfig, SchedulingPolicy
from transom_core.contract import ErrorInfo, Request, SamplingParams, Usage
from transom_core.errors import WorkerLost


async def text(response: asyncio.Task) -> str:
    return (await response).json()["choices"][0]["text"]


async def test_a_request_waits_for_the_first_worker() -> None:
    async with running_api(*stub_workers(1), **PATIENT) as api:
        api.directory.remove(api.worker)
        await until(lambda: not api.router.connections)
        answer = asyncio.create_task(api.complete())
        await until(lambda: len(api.router.queue) == 1)
        assert sample(api.router, "waiting_requests") == 1
        assert api.directory.num_wakes  # so that a cluster that was scaled to nothing starts a worker
        api.directory.add(StubWorker(worker="w1"))
        assert await text(answer) == "abc"
        assert len(api.router.queue) == 0


async def test_a_router_that_never_had_a_worker_waits_no_longer_than_the_request_may_take() -> None:
    async with running_api(StubWorker(can_open=False), limits=LimitsConfig(request_timeout_s=0.05), **PATIENT) as api:
        async with asyncio.timeout(120):
            response = await api.complete()
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")


async def test_a_batch_larger_than_any_queue_is_spread() -> None:
    async with running_api(*stub_workers(3, max_running=4)) as api:
        assert [choice["text"] for choice in (await api.complete(n=10)).json()["choices"]] == ["abc"] * 10


async def test_admission_is_all_or_nothing() -> None:
    async with running_api(*stub_workers(3, max_running=4, max_events=1)) as api:
        assert (await api.complete(n=13, stream=True)).status_code == 503
        await until(lambda: not any(worker.num_running for worker in api.workers))
        assert num_in_flight(api.router) == len(api.router.queue) == 0


async def test_a_worker_that_disappears_finishes_what_it_has() -> None:
    old, new = stub_workers(2, max_events=2)
    async with running_api(old, timings=timings(drain_s=20.0), **PATIENT) as api:
        answer = asyncio.create_task(api.complete(max_tokens=5))
        await until(lambda: old.num_silent == 1)
        api.directory.remove(old)
        await until(lambda: api.router.connections["w0"].is_draining)
        assert (await api.client.get("/health")).status_code == 503
        assert sample(api.router, "workers", state="draining") == 1
        new.go()
        api.directory.add(new)
        assert (await api.complete()).status_code == 200
        old.go()
        assert await text(answer) == "abcde"
        await until(lambda: set(api.router.connections) == {"w1"})
        assert (len(old.submitted), len(new.submitted)) == (1, 1)
        assert sample(api.router, "drains_total", outcome="finished") == 1
        assert sample(api.router, "failovers_total", outcome="resumed") == 0


async def test_a_worker_that_is_lost_while_it_drains_counts_as_lost() -> None:
    """A poison request must not go on for ever because the directory hears of deaths before the streams break."""
    values = {"failover": FailoverConfig(wait_s=120.0, max_resumes=0), "timings": timings(drain_s=20.0)}
    async with running_api(*stub_workers(1, max_events=2), **values) as api:
        answer = asyncio.create_task(api.complete(max_tokens=5))
        await until(lambda: api.worker.num_silent == 1)
        api.directory.remove(api.worker)
        await until(lambda: api.router.connections["w0"].is_draining)
        api.worker.kill()
        assert (await answer).status_code == 503
        assert sample(api.router, "failovers_total", outcome="gave_up") == 1
        await until(lambda: not api.router.connections)


async def test_a_drain_ends_although_calls_to_its_host_never_return() -> None:
    old, new = stub_workers(2, max_events=2)

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    async with running_api(old, timings=timings(drain_s=0.0, last_call_timeout_s=0.01), **PATIENT) as api:
        answer = asyncio.create_task(api.complete(max_tokens=5))
        await until(lambda: old.num_silent == 1)
        old.abort = old.info = never  # type: ignore[method-assign, assignment]
        new.go()
        api.directory.add(new)
        api.directory.remove(old)
        assert await text(answer) == "abcde"
        await until(lambda: set(api.router.connections) == {"w1"})


async def test_a_directory_that_fails_is_asked_again() -> None:
    class Failing(StubDirectory):
        num_failures = 0

        async def changes(self) -> AsyncGenerator[Mapping[str, StubWorker], None]:
            if self.num_failures < 2:
                self.num_failures += 1
                raise ConnectionError("no controller")
            async for present in super().changes():
                yield present

    router = make_router(directory=Failing(*stub_workers(1)), timings=timings(directory_retry_s=0.0))
    async with running(router, 1):
        assert router.is_ready


async def test_a_request_that_cannot_be_placed_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Placer):
        def place(
            self, request: Request, among: Collection[str], *, sources: Collection[str] | None = None
        ) -> PlacementDecision:
            if request.prompt_token_ids == tuple(b"odd"):
                raise KeyError(request.prompt_token_ids)
            return super().place(request, among, sources=sources)

    async with running_api(*stub_workers(1), placer=Broken("kv"), **PATIENT) as api:
        api.directory.remove(api.worker)
        await until(lambda: not api.router.connections)
        odd, fine = (asyncio.create_task(api.complete(prompt=prompt)) for prompt in ("odd", "fine"))
        await until(lambda: len(api.router.queue) == 2)
        api.directory.add(StubWorker(worker="w1"))
        assert (await odd).status_code == 500
        assert await text(fine) == "abc"
        assert "KeyError" in caplog.text
        assert str(tuple(b"odd")) not in caplog.text


async def test_an_event_that_cannot_be_handled_fails_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Placer):
        def first_event(self, request_id: str, usage: Usage) -> None:
            if usage.num_prompt_tokens == len("odd"):
                raise KeyError(request_id)

    async with running_api(*stub_workers(1), placer=Broken("kv"), **PATIENT) as api:
        odd, fine = (asyncio.create_task(api.complete(prompt=prompt, max_tokens=9)) for prompt in ("odd", "fine"))
        assert (await odd).status_code == 500
        assert await text(fine) == "abcdefghi"
        await until(lambda: api.worker.aborted)
        assert api.worker.num_streams == 1  # the connection is whole
        assert num_in_flight(api.router) == 0
        assert "KeyError" in caplog.text


async def test_the_requests_of_a_lost_worker_migrate_or_end_whatever_else_fails() -> None:
    class Broken(Placer):
        """`remove_worker` always fails; `ended` fails once, when a test says so."""

        fails_once = False

        def remove_worker(self, worker_id: str) -> None:
            raise KeyError

        def ended(self, request_id: str) -> None:
            super().ended(request_id)
            if self.fails_once:
                self.fails_once = False
                raise KeyError

    first, second = stub_workers(2, max_events=2)
    placer = Broken("kv")
    async with running_api(first, placer=placer, **PATIENT) as api:
        answer = asyncio.create_task(api.complete())
        await until(lambda: first.num_silent == 1)
        first.kill()
        api.directory.add(second)
        assert await text(answer) == "abc"
        second.num_silent = 0
        answer = asyncio.create_task(api.complete())
        await until(lambda: second.num_silent == 1)
        placer.fails_once = True  # as the queue handles the loss
        second.kill()
        assert (await answer).status_code == 500
        assert len(api.router.queue) == 0


async def test_a_worker_that_cannot_take_requests_is_in_cooldown() -> None:
    starting, ready = stub_workers(2)
    starting.admission_error = ErrorInfo.of(WorkerLost("it starts its ranks again"))
    async with running_api(starting, ready, routing_policy="round_robin") as api:
        for _ in range(6):
            assert (await api.complete()).status_code == 200
        assert (len(starting.submitted), len(ready.submitted)) == (1, 6)
        api.router.connections["w0"].cooldown_until_s = 0.0  # a second later
        starting.admission_error = None
        for _ in range(2):
            assert (await api.complete()).status_code == 200
        assert len(starting.submitted) == 2


@pytest.mark.parametrize(("policy", "order"), [("priority", "2130"), ("fcfs", "0123")])
async def test_streams_that_have_begun_come_first_and_then_the_policys_order(
    policy: SchedulingPolicy, order: str
) -> None:
    first, second = stub_workers(2, max_events=1)
    async with running_api(first, **PATIENT, priorities=PriorityConfig(policy=policy)) as api:
        answers = [asyncio.create_task(api.complete(prompt="begun", priority=4))]
        await until(lambda: first.num_silent == 1)
        second.go()
        first.kill()
        await until(lambda: len(api.router.queue) == 1)
        for num, priority in enumerate((3, 0, -1, 0)):
            answers.append(asyncio.create_task(api.complete(prompt=str(num), priority=priority)))
            await until(lambda num=num: len(api.router.queue) == num + 2)  # type: ignore[misc]
        api.directory.add(second)
        assert [await text(answer) for answer in answers] == ["abc"] * 5
        assert [bytes(r.prompt_token_ids).decode() for r in second.submitted] == ["begun", *order]


async def test_the_line_ages() -> None:
    """A request of priority 1 that came 31 s before one of priority 0 goes first."""
    one = Request(request_id="r-0-0", prompt_token_ids=(1,), params=SamplingParams(), seed=0)
    low, urgent = (InFlightRequest(OutputStream([one]), 0, replace(one, priority=priority)) for priority in (1, 0))
    low.submitted_s = urgent.submitted_s - 31.0
    assert low.queue_order("priority") < urgent.queue_order("priority")
    low.submitted_s = urgent.submitted_s - 29.0
    assert low.queue_order("priority") > urgent.queue_order("priority")
    assert low.queue_order("fcfs") < urgent.queue_order("fcfs")


async def test_a_new_request_does_not_overtake_one_that_a_full_worker_refused() -> None:
    """The stream was begun at a lost worker and waits for another one; what that one has room for is not for newcomers."""
    lost, full = stub_workers(2, max_events=1)
    full.max_running = 1
    async with running_api(lost, **PATIENT, timings=timings(retry_s=0.05)) as api:
        begun = asyncio.create_task(api.complete(prompt="begun"))
        await until(lambda: lost.num_silent == 1)
        api.directory.add(full)
        await until(lambda: len(api.router.connections) == 2 and api.router.connections[full.worker].takes_requests)
        lost.can_open = False
        api.router.connections[lost.worker].is_draining = True  # takes nothing new
        occupying = asyncio.create_task(api.complete(prompt="occupies"))
        await until(lambda: full.num_silent == 1)
        lost.kill()
        await until(lambda: len(api.router.queue) == 1)
        full.max_running = 2  # there is room, which the router does not know before its next retry
        assert (await api.complete(prompt="new")).status_code == 503
        full.go()
        assert [await text(answer) for answer in (begun, occupying)] == ["abc"] * 2


async def test_a_call_for_the_index_that_fails_is_made_again() -> None:
    """The mirror asks once for each gap: without the index it would say nothing of this worker for ever."""
    async with running_api(*stub_workers(1), timings=timings(first_reconnect_pause_s=0.0)) as api:
        resync, calls = api.worker.resync, []

        async def fails_at_first(router_id: str) -> None:
            calls.append(router_id)
            if len(calls) < 3:
                raise ConnectionError("not now")
            await resync(router_id)

        api.worker.resync = fails_at_first  # type: ignore[method-assign]
        api.worker.skip_index_updates()
        await until(lambda: api.worker.num_resyncs == 1)
        assert len(calls) == 3


async def test_a_router_that_drains_finishes_its_answers_and_takes_no_others() -> None:
    async with running_api(*stub_workers(2, max_events=2), timings=timings(drain_s=20.0)) as api:
        answer = asyncio.create_task(api.complete(max_tokens=5, stream=True))
        await until(lambda: sum(worker.num_silent for worker in api.workers))
        stopping = asyncio.create_task(api.router.stop())
        await until(lambda: api.router.is_draining)
        health = await api.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "this router is being stopped")
        refused = await api.complete()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert not stopping.done()
        for worker in api.workers:
            worker.go()
        assert (await answer).text.endswith("data: [DONE]\n\n")
        await stopping


async def test_routes_tell_of_all_workers() -> None:
    async with running_api(*stub_workers(3)) as api:
        index = (await api.client.get("/")).json()
        assert [(one["id"], one["state"]) for one in index["workers"]] == [(f"w{i}", "open") for i in range(3)]
        assert (index["workers"][0]["load"]["num_waiting"], index["workers"][0]["cache"]) == (0, ["full"])
        assert sample(api.router, "workers", state="open") == 3
        api.workers[0].kill()
        await until(lambda: not api.router.connections["w0"].is_open)
        assert (await api.client.get("/health")).status_code == 200
        assert sample(api.router, "workers", state="closed") == 1
        index = (await api.client.get("/")).json()
        assert [worker["state"] for worker in index["workers"]] == ["closed", "open", "open"]
        for worker in api.workers[1:]:
            worker.kill()
        await until(lambda: not api.router.is_ready)
        health = await api.client.get("/health")
        told = (health.status_code, health.json()["status"], health.headers["retry-after"])
        assert told == (503, "no worker is ready", "1")
        assert (await api.client.get("/v1/models")).json()["data"][0]["max_model_len"] == 512  # as the last worker said
