"""Prompts at prefill workers, streams at decode workers: the client gets the whole answer once, whichever worker is
lost or missing."""

import asyncio
import json
from typing import Any

import pytest

from tests.cluster.conftest import PATIENT, Api, num_in_flight, running_api, until
from tests.cluster.router.test_failover import without_ids
from tests.cluster.stub_worker import LETTERS, StubWorker
from transom_core.config import WorkerRole
from transom_core.contract import WorkerLoad

LONG = "x" * 400
SLOW = WorkerLoad(max_num_seqs=1000, prefill_tokens_per_s=100.0)  # so that a prompt is worth moving


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


BODIES: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"logprobs": 2, "echo": True},
    {"stream": True, "n": 2, "logprobs": 1, "stream_options": {"include_usage": True}},
]


@pytest.mark.parametrize("body", BODIES)
async def test_an_answer_from_two_workers_is_that_of_one(body: dict[str, Any]) -> None:
    body = {"max_tokens": 10, "prompt": LONG, **body}
    async with running_api() as api:
        undisturbed = (await api.complete(**body)).text
    async with running_api(*pair(), **PATIENT) as api:
        answer = await api.complete(**body)
        count = body.get("n", 1)
        prefix = {"p": [(0, True)] * count, "d": [(1, False)] * count}
        if "echo" not in body:
            assert ran(api) == prefix
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
        answer = await api.complete(prompt=LONG, max_tokens=10, **body)
        assert answer.status_code == 200
        assert ran(api) == ({"p": [(0, True)], "d": [(1, False)]} if moves else {"p": [], "d": [(0, False)]})


async def test_an_answer_of_one_token_is_not_handed_over() -> None:
    async with running_api(*pair(), **PATIENT) as api:
        assert (await api.complete(prompt=LONG, max_tokens=1)).json()["choices"][0]["text"] == "a"
        assert ran(api) == {"p": [(0, True)], "d": []}


async def test_a_stream_goes_on_at_its_prefill_worker_when_the_decode_workers_are_full() -> None:
    prefill, decode = pair()
    decode.max_running = 0
    async with running_api(prefill, decode, **PATIENT) as api:
        answer = await api.complete(prompt=LONG, max_tokens=26)
        assert answer.json()["choices"][0]["text"] == LETTERS
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
