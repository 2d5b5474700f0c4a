"""Workers of two models: an answer is of one of them from beginning to end, and new requests go to the newer one."""

import asyncio
from typing import Any

import pytest

from tests.cluster.conftest import PATIENT, Api, make_router, running, running_api, sample, sent_events, timings, until
from tests.cluster.stub_worker import StubWorker
from transom_cluster.openai.answer.writers import system_fingerprint
from transom_cluster.router.failover import Loss
from transom_cluster.router.in_flight_requests import InFlightRequest
from transom_cluster.router.output_stream import OutputStream
from transom_core.contract import Request, SamplingParams, WorkerLoad

MESSAGE = {"messages": [{"role": "user", "content": "hi"}]}
FULL = WorkerLoad(max_num_seqs=2, num_running=2)


def v1(worker: str, **more: Any) -> StubWorker:
    return StubWorker(worker=worker, identity="1" * 32, loaded_at_s=1.0, **more)


def v2(worker: str, **more: Any) -> StubWorker:
    return StubWorker(worker=worker, identity="2" * 32, loaded_at_s=2.0, **more)


async def add(api: Api, worker: StubWorker) -> None:
    api.directory.add(worker)
    await until(lambda: worker.worker in api.router.connections and api.router.connections[worker.worker].is_open)


async def lose(api: Api, worker: StubWorker) -> None:
    """Kill a worker, which the directory notices."""
    worker.kill()
    await until(lambda: not api.router.connections[worker.worker].is_open)
    api.directory.remove(worker)


async def test_a_stream_whose_model_is_gone_ends_with_a_clear_error() -> None:
    first = v1("w0", max_events=2)
    async with running_api(first, **PATIENT) as api:
        answers = [asyncio.create_task(api.complete(max_tokens=6, stream=stream)) for stream in (True, False)]
        await until(lambda: first.num_silent == 2 and first.is_read)
        newer = v2("w1")
        await add(api, newer)
        await lose(api, first)
        streamed, plain = [await answer for answer in answers]
        *text, error = sent_events(streamed.text)
        assert "".join(one["choices"][0]["text"] for one in text) == "ab"
        assert {one["system_fingerprint"] for one in text} == {system_fingerprint("1" * 32)}
        assert error["error"]["code"] == plain.json()["error"]["code"]
        assert "The model was replaced by another" in error["error"]["message"]
        assert plain.status_code == 503
        assert not newer.submitted


@pytest.mark.parametrize(("path", "fields"), [("completions", {"prompt": "hi"}), ("messages", MESSAGE)])
async def test_a_stream_whose_worker_is_lost_after_an_update_of_its_weights_goes_on_and_says_so(path, fields) -> None:
    first, other = v1("w0", max_events=2), v1("w1")
    async with running_api(first, **PATIENT) as api:
        answer = asyncio.create_task(api.client.post(f"/v1/{path}", json={"max_tokens": 6, **fields}))
        await until(lambda: first.num_silent and first.is_read)
        await add(api, other)
        for identity in ("2" * 32, "3" * 32):
            first.replace_weights(identity)
            other.replace_weights(identity)
        await until(lambda: {one.identity for one in api.router.connections.values()} == {"3" * 32})
        await lose(api, first)
        assert (await answer).json()["usage"]["weight_updates"] == 2
        assert (await api.complete(max_tokens=2)).json()["usage"].get("weight_updates") is None


async def test_a_stream_that_waits_while_the_weights_are_replaced_goes_on() -> None:
    """No worker has it when the news comes."""
    first, other = v1("w0", max_events=2), v1("w1", max_running=0)
    async with running_api(first, **PATIENT) as api:
        answer = asyncio.create_task(api.complete(max_tokens=6))
        await until(lambda: first.num_silent and first.is_read)
        await add(api, other)
        await lose(api, first)
        await until(lambda: len(api.router.queue) == 1)
        other.replace_weights("2" * 32)
        await until(lambda: api.router.connections["w1"].identity == "2" * 32)
        other.max_running = None
        body = (await answer).json()
        assert (body["choices"][0]["text"], body["usage"]["weight_updates"]) == ("abcdef", 1)
        assert sample(api.router, "worker_changes_total", change="joined") == 2


async def test_a_worker_that_starts_with_weights_that_were_replaced_is_not_the_newest() -> None:
    updated = v1("w0")
    async with running_api(updated, **PATIENT) as api:
        updated.replace_weights("2" * 32)
        restarted = v1("w1")
        restarted.loaded_at_s = 9.0
        await add(api, restarted)
        await until(lambda: api.router.connections["w0"].identity == "2" * 32)
        for _ in range(3):
            await api.complete()
        assert (len(updated.submitted), len(restarted.submitted)) == (3, 0)


async def test_an_answer_that_has_not_begun_goes_to_the_newer_model() -> None:
    first = v1("w0", max_events=0)
    async with running_api(first, **PATIENT) as api:
        answer = asyncio.create_task(api.complete(max_tokens=6))
        await until(lambda: first.num_silent)
        await add(api, v2("w1"))
        await lose(api, first)
        body = (await answer).json()
        assert (body["choices"][0]["text"], body["system_fingerprint"]) == ("abcdef", system_fingerprint("2" * 32))


async def test_new_requests_go_to_the_newest_model_that_has_room() -> None:
    old, new = v1("w0"), v2("w1", load=FULL)
    async with running_api(old, new, **PATIENT) as api:
        await until(lambda: all(one.load is not None for one in api.router.connections.values()))
        await api.complete()
        assert (len(old.submitted), len(new.submitted)) == (1, 0)
    old, new = v1("w0"), v2("w1")
    async with running_api(old, new, **PATIENT) as api:
        for _ in range(5):
            await api.complete()
        assert (len(old.submitted), len(new.submitted)) == (0, 5)
        await lose(api, new)
        await api.complete()
        assert len(old.submitted) == 1


async def test_a_worker_with_a_request_on_trial_does_not_hide_the_older_model() -> None:
    """The newer model's only worker takes no other request meanwhile."""
    old, new = v1("w0"), v2("w1")
    async with running_api(old, new, **PATIENT) as api:
        one = Request(request_id="trial", prompt_token_ids=(1,), params=SamplingParams(), seed=0)
        suspect = api.router.connections["w1"].suspect = InFlightRequest(OutputStream([one]), 0, one)
        suspect.record.strikes = [Loss([suspect.record]) for _ in range(PATIENT["failover"].max_lost_workers - 1)]
        assert (await api.complete()).status_code == 200
        assert (len(old.submitted), len(new.submitted)) == (1, 0)


async def test_choices_wait_for_the_model_that_has_the_others_while_another_model_has_room() -> None:
    """The first 32 choices are placed at once, and the new model's worker has no room for more of them."""
    old, new = v1("w0"), v2("w1", max_running=32)
    async with running_api(old, new, **PATIENT) as api:
        assert [choice["text"] for choice in (await api.complete(n=40)).json()["choices"]] == ["abc"] * 40
        assert not old.submitted


async def test_a_worker_with_another_tokenizer_gets_no_requests() -> None:
    """Its token ids stand for other texts."""
    ours, other = v1("w0", tokenizer_digest="ours"), v2("w1", tokenizer_digest="other")
    router = make_router(ours, other)
    router._pool.tokenizer = "ours"
    async with running(router, 2):
        assert [one.takes_requests for one in router.connections.values()] == [True, False]
        assert list(router.served) == ["1" * 32]


async def test_streams_end_at_the_last_worker_of_their_model_however_long_it_drains() -> None:
    old, new = v1("w0", max_events=2), v2("w1")
    async with running_api(old, timings=timings(drain_s=0.0, last_drain_s=100.0), **PATIENT) as api:
        answer = asyncio.create_task(api.complete(max_tokens=6))
        await until(lambda: old.num_silent and old.is_read)
        await add(api, new)
        api.directory.remove(old)
        await until(lambda: api.router.connections["w0"].is_draining)
        await api.complete()
        old.go()
        assert (await answer).json()["choices"][0]["text"] == "abcdef"
        await until(lambda: "w0" not in api.router.connections)
        assert (len(old.submitted), len(new.submitted)) == (1, 1)


async def test_models_and_metrics_say_which_models_are_there() -> None:
    async with running_api(v1("w0"), v2("w1"), v1("w2"), **PATIENT) as api:
        (card,) = (await api.client.get("/v1/models")).json()["data"]
        assert card["versions"] == [
            {"system_fingerprint": system_fingerprint(digit * 32), "identity": digit * 32, "workers": number}
            for digit, number in (("2", 1), ("1", 2))
        ]
        (worker,) = [one for one in (await api.client.get("/")).json()["workers"] if one["id"] == "w1"]
        assert worker["identity"] == "2" * 32
        assert sample(api.router, "worker_identities", identity="1" * 32) == 2
