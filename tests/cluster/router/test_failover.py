"""Streams that outlive their worker: killed at every point, the client gets the whole answer once, on the same connection. The same
with prompts at prefill workers and streams at decode workers, whichever worker is lost or missing."""

import asyncio
import json
from itertools import product
from typing import Any
from unittest import mock

import pytest

from tests.cluster.conftest import PATIENT, Api, num_in_flight, running_api, sample, timings, until
from tests.cluster.stub_worker import LETTERS, StubWorker, stub_workers
from tests.matrices import some_daily
from transom_core.config import FailoverConfig, LimitsConfig, WorkerRole
from transom_core.contract import ErrorInfo, OutputEvent, WorkerLoad
from transom_core.errors import RequestError

LONG = "x" * 400
SLOW = WorkerLoad(max_num_seqs=1000, prefill_tokens_per_s=100.0)  # so that a prompt is worth moving


def busy(api: Api) -> list[StubWorker]:
    """Workers that compute something."""
    return [worker for worker in api.workers if worker.num_running]


async def silent(api: Api) -> StubWorker:
    """The only worker that computes something, once all its events have arrived."""
    await until(lambda: busy(api) and all(w.num_silent == len(w.submitted) and w.is_read for w in busy(api)))
    (worker,) = busy(api)
    return worker


async def kill_one(api: Api) -> StubWorker:
    """Kill the only worker that computes something, once all its events have arrived; the others bring all theirs from now on."""
    victim = await silent(api)
    for worker in api.workers:
        worker.max_events = None
    victim.kill()
    return victim


def without_ids(text: str) -> Any:
    """An answer but for what differs each time."""
    objects = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line and "[DONE]" not in line]
    for one in objects:
        one.pop("id")
        one.pop("created")
    return objects, text.count("[DONE]")


BODIES = [
    {},
    {"logprobs": 2, "echo": True},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": True, "logprobs": 1, "echo": True, "stream_options": {"include_usage": True}},
]


@pytest.mark.parametrize(
    ("num_events", "body"),
    some_daily(
        product((0, 1, 5, 9), BODIES),
        daily=[*product((0,), BODIES), *zip((1, 9, 5, 1), BODIES, strict=True), (5, BODIES[3])],
    ),
)
async def test_a_killed_worker_changes_nothing_of_the_answer(body: dict[str, Any], num_events: int) -> None:
    body = {"max_tokens": 10, **body}
    async with running_api() as api:
        undisturbed = (await api.complete(**body)).text
    async with running_api(*stub_workers(2, max_events=num_events), **PATIENT) as api:
        answer = asyncio.create_task(api.complete(**body))
        victim = await kill_one(api)
        for worker in api.workers:
            worker.num_cached = 3 if num_events == 0 else 7  # what counts is what the first one found
        response = await answer
        (resumed,) = next(w for w in api.workers if w is not victim).submitted
        assert (len(resumed.resumed_output_ids), resumed.seed) == (num_events, victim.submitted[0].seed)
        assert resumed.waited_s > victim.submitted[0].waited_s
        assert (resumed.params.prompt_logprobs is None) == (num_events > 0 or "echo" not in body)
        assert sample(api.router, "failovers_total", outcome="resumed") == 1
    one, same = without_ids(undisturbed), without_ids(response.text)
    if body.get("logprobs") and not body.get("stream"):
        assert same == one
    assert (texts(same[0]), same[1]) == (texts(one[0]), one[1])
    assert same[0][-1].get("usage") == one[0][-1].get("usage")


def texts(objects: list[dict[str, Any]]) -> dict[int, str]:
    found: dict[int, str] = {}
    for one in objects:
        for choice in one["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


async def test_a_submission_whose_answer_is_lost_goes_elsewhere_and_is_aborted() -> None:
    async with running_api(*stub_workers(2, max_events=0), timings=timings(submit_grace_s=0.01), **PATIENT) as api:
        for worker in api.workers:
            worker.reply_failure = ConnectionError("the reply was lost")
        answer = asyncio.create_task(api.complete(max_tokens=5))
        await until(lambda: busy(api))
        (first,) = busy(api)
        for worker in api.workers:
            worker.reply_failure, worker.max_events = None, None
        assert (await answer).json()["choices"][0]["text"] == LETTERS[:5]
        await first.until(lambda: first.submitted[0].request_id in first.aborted)
        assert first.num_running == 0


async def test_output_that_is_missing_is_computed_again() -> None:
    async with running_api(*stub_workers(1, max_events=2), **PATIENT) as api:
        answer = asyncio.create_task(api.complete(max_tokens=8))
        await silent(api)
        api.worker.max_events = None
        first = api.worker.submitted[0].request_id
        api.worker.push(OutputEvent(request_id=first, position=5, token_ids=(1,), text="?", text_offset=5))
        assert (await answer).json()["choices"][0]["text"] == LETTERS[:8]
        assert first in api.worker.aborted


@pytest.mark.parametrize("position", [0, 2, 3, 7])
async def test_an_error_that_is_no_loss_ends_the_request_whatever_its_position(position: int) -> None:
    async with running_api(*stub_workers(2, max_events=2), **PATIENT) as api:
        answer = asyncio.create_task(api.complete(max_tokens=8))
        first = await silent(api)
        error = ErrorInfo.of(RequestError("it has become too complex", param="grammar"))
        request_id = first.submitted[0].request_id
        first.push(OutputEvent(request_id=request_id, position=position, finish_reason="error", error=error))
        response = await answer
    assert (response.status_code, response.json()["error"]["message"]) == (400, "it has become too complex")
    assert sum(len(worker.submitted) for worker in api.workers) == 1


async def test_two_workers_that_die_together_make_no_poison() -> None:
    """The second one is dead already when it is sent what the first was lost with; its stream just has not said so yet."""
    async with running_api(*stub_workers(2, max_events=3), **PATIENT) as api:
        answer = asyncio.create_task(api.complete(max_tokens=8))
        first = await silent(api)
        (second,) = [worker for worker in api.workers if worker is not first]
        second.is_dead, second.can_open = True, False
        first.kill()
        await until(lambda: api.router.connections[second.worker].in_flight.request_ids)
        for _ in range(20):
            await asyncio.sleep(0)
        second.kill()
        api.directory.add(StubWorker(worker="w2"))
        assert (await answer).json()["choices"][0]["text"] == LETTERS[:8]
        assert second.num_failed_submits == 0


@pytest.mark.parametrize("num_events", [0, 3])
async def test_resumes_are_bounded(num_events: int) -> None:
    failover = FailoverConfig(wait_s=120.0, max_resumes=1, max_lost_workers=9)
    async with running_api(*stub_workers(3, max_events=num_events), failover=failover) as api:
        answer = asyncio.create_task(api.complete(stream=True, max_tokens=12))
        for _ in range(2):
            (await silent(api)).kill()
        response = await answer
        assert "lost 2 times" in response.text
        assert sample(api.router, "failovers_total", outcome="gave_up") == 1
        assert sum(len(worker.submitted) for worker in api.workers) == 2
    if num_events:
        assert response.status_code == 200
        assert '"code":"worker_unavailable"' in response.text
        assert "[DONE]" not in response.text
    else:
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")


async def test_a_client_that_leaves_while_its_request_is_submitted_again() -> None:
    """It is aborted at once, and again after the submission, which the first abort may have overtaken."""
    async with running_api(*stub_workers(2, max_events=3), **PATIENT) as api:
        answer = asyncio.create_task(api.complete(max_tokens=8))
        await until(lambda: busy(api))
        (other,) = [w for w in api.workers if not w.num_running]
        submit, entered, release = other.submit, asyncio.Event(), asyncio.Event()

        async def slow(*args: Any) -> Any:
            entered.set()
            await release.wait()
            return await submit(*args)

        other.submit = slow  # type: ignore[method-assign,assignment]
        await kill_one(api)
        await entered.wait()
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
        await other.until(lambda: other.aborted)  # at once: at a worker the submission may wait behind those of others
        release.set()
        await other.until(lambda: len(other.aborted) == 2)  # again, since the first abort came before the submission
        assert set(other.aborted) == {other.submitted[0].request_id}
        assert other.num_running == num_in_flight(api.router) == 0


async def test_a_call_that_never_returns_while_the_stream_goes_on() -> None:
    """As where an object store hangs: the other worker gets the request."""
    async with running_api(*stub_workers(2), timings=timings(call_timeout_s=0.05), **PATIENT) as api:
        never: Any = asyncio.Event().wait
        api.workers[0].submit = lambda *_: never()  # type: ignore[method-assign]
        assert [one.status_code for one in await asyncio.gather(*(api.complete() for _ in range(4)))] == [200] * 4
        assert len(api.workers[1].submitted) == 4
        assert api.workers[0].aborted


async def test_a_deadline_goes_on_counting() -> None:
    values = {"limits": LimitsConfig(request_timeout_s=2.0), "timings": timings(deadline_grace_s=0.0), **PATIENT}
    async with running_api(*stub_workers(1, max_events=3), **values) as api:
        answer = asyncio.create_task(api.complete(max_tokens=8))
        await kill_one(api)
        assert (await answer).status_code == 408
        assert len(api.router.queue) == 0


async def test_requests_whose_loss_cannot_be_handled_end_and_leave_the_queue() -> None:
    async with running_api(StubWorker(max_events=1)) as api:
        answers = [asyncio.create_task(api.complete()) for _ in range(2)]
        await until(lambda: api.worker.num_silent == 2 and api.worker.is_read)
        api.router.queue._wake_workers = mock.Mock(side_effect=RuntimeError("a bug"))
        api.worker.kill()
        assert [one.status_code for one in await asyncio.gather(*answers)] == [500, 500]
        assert not len(api.router.queue)


def worker(name: str, role: WorkerRole, **fields: Any) -> StubWorker:
    return StubWorker(worker=name, role=role, can_fetch=True, load=SLOW, **fields)


def pair(**fields: Any) -> tuple[StubWorker, StubWorker]:
    return worker("p", "prefill", **fields), worker("d", "decode", **fields)


def ran(api: Api) -> dict[str, list[tuple[int, bool]]]:
    """Of each worker's attempts the number of tokens that they resumed from, and whether they ended with the first token."""
    return {
        one.worker: [(len(request.resumed_output_ids), request.prefill_only) for request in one.submitted]
        for one in api.workers
    }


HANDED_OVER: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"logprobs": 2, "echo": True},
    {"stream": True, "n": 2, "logprobs": 1, "stream_options": {"include_usage": True}},
]


@pytest.mark.parametrize("body", HANDED_OVER)
async def test_an_answer_from_two_workers_is_that_of_one(body: dict[str, Any]) -> None:
    body = {"max_tokens": 10, "prompt": LONG, **body}
    async with running_api() as api:
        undisturbed = (await api.complete(**body)).text
    async with running_api(*pair(), **PATIENT) as api:
        answer = await api.complete(**body)
        count = body.get("n", 1)
        if "echo" not in body:
            assert ran(api) == {"p": [(0, True)] * count, "d": [(1, False)] * count}
        assert num_in_flight(api.router) == 0
        assert without_ids(answer.text) == without_ids(undisturbed)


WINDOW = '{"type": "window", "sinks": 4, "window": 64}'
HEAVY = '{"type": "heavy", "sinks": 4, "budget": 128}'


@pytest.mark.parametrize(
    ("default", "body", "moves"),
    [
        (WINDOW, {}, True),
        (None, {"kv_policy": json.loads(WINDOW)}, True),
        (HEAVY, {}, False),
        (HEAVY, {"kv_policy": json.loads(WINDOW)}, True),
        (HEAVY, {"kv_policy": {"type": "full"}}, True),
        (WINDOW, {"kv_quality": True}, False),
    ],
)
async def test_windows_are_handed_over_whether_they_are_the_deployments_or_the_requests(
    default: str | None, body: dict[str, Any], moves: bool
) -> None:
    """What depends on a request's history is computed where it decodes."""
    async with running_api(*pair(), **PATIENT, kv_policy=default) as api:
        assert (await api.complete(prompt=LONG, max_tokens=10, **body)).status_code == 200
        assert ran(api) == ({"p": [(0, True)], "d": [(1, False)]} if moves else {"p": [], "d": [(0, False)]})


async def test_an_answer_of_one_token_is_not_handed_over() -> None:
    async with running_api(*pair(), **PATIENT) as api:
        assert (await api.complete(prompt=LONG, max_tokens=1)).json()["choices"][0]["text"] == "a"
        assert ran(api) == {"p": [(0, True)], "d": []}


async def test_a_stream_goes_on_at_its_prefill_worker_when_the_decode_workers_are_full() -> None:
    prefill, decode = pair()
    decode.max_running = 0
    async with running_api(prefill, decode, **PATIENT) as api:
        assert (await api.complete(prompt=LONG, max_tokens=26)).json()["choices"][0]["text"] == LETTERS
        assert ran(api)["p"] == [(0, True), (1, False)]


@pytest.mark.parametrize("lost", ["p", "d"])
@pytest.mark.parametrize("num_events", [0, 1, 5])
async def test_a_lost_worker_changes_nothing_of_the_answer(lost: str, num_events: int) -> None:
    if lost == "p" and num_events:
        return  # the attempt has ended with its first event
    workers = [worker("p", "prefill"), worker("d", "decode"), worker("e", "decode"), worker("q", "prefill")]
    for one in workers:
        if (one.role == "prefill") == (lost == "p"):
            one.max_events = num_events
    async with running_api(*workers, **PATIENT) as api:
        answer = asyncio.create_task(api.complete(prompt=LONG, max_tokens=26))
        await until(lambda: any(one.num_silent and one.is_read for one in api.workers))
        (victim,) = [one for one in api.workers if one.num_silent]
        for one in api.workers:
            one.max_events = None
        victim.kill()
        assert (await answer).json()["choices"][0]["text"] == LETTERS
