"""Which request is to blame for a lost worker: the rule by itself, and a poison request among innocent streams."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.conftest import Api, running_api, until
from tests.cluster.stub_worker import StubWorker
from transom_cluster.router.failover import RELEASE_TOKENS, LossRecord, after_loss, assign_blame, may_have_run
from transom_worker.config import FailoverConfig
from transom_worker.contract import WorkerLoad

POISON = ord("!")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass
class Attempt:
    record: LossRecord = field(default_factory=LossRecord)
    is_sent: bool = True
    awaits_reply: bool = False
    num_new_tokens: int = 0


def test_alone_on_two_lost_workers():
    record = LossRecord()
    assert assign_blame([record], max_lost_workers=2) is None
    assert record.is_suspect
    assert assign_blame([record], max_lost_workers=2) is record


def test_the_suspect_is_named_and_the_others_are_cleared():
    records = [LossRecord() for _ in range(32)]
    assert assign_blame(records, max_lost_workers=2) is None
    assert all(record.is_suspect for record in records)
    records[3].release()  # it brought more tokens
    bystanders = [LossRecord(), records[3]]
    assert assign_blame([*bystanders, records[7]], max_lost_workers=2) is records[7]
    assert not any(record.is_suspect or record.num_losses for record in [*records[:7], *records[8:], *bystanders])


def test_suspects_that_were_lost_together_are_not_stopped():
    records = [LossRecord() for _ in range(2)]
    for _ in range(5):
        assert assign_blame(records, max_lost_workers=2) is None
    assert assign_blame(records[:1], max_lost_workers=2) is records[0]
    assert records[1].num_losses == 0


def test_losses_are_forgotten_after_more_tokens():
    record, other = LossRecord(), LossRecord()
    assign_blame([record, other], max_lost_workers=2)
    record.release()
    assert (record.num_losses, other.num_losses) == (0, 1)
    for _ in range(5):
        assert assign_blame([record], max_lost_workers=2) is None
        record.release()


def test_who_is_alone_for_one_router_only_becomes_a_suspect():
    """Another router's requests may have been there too."""
    record = LossRecord()
    assert assign_blame([record], max_lost_workers=1) is None
    assert record.is_suspect
    assert assign_blame([record], max_lost_workers=1) is record


def test_a_request_that_only_waited_is_not_to_blame():
    streaming = [Attempt(num_new_tokens=3) for _ in range(2)]
    queued, unsent, unanswered = Attempt(), Attempt(is_sent=False), Attempt(awaits_reply=True)
    attempts = [*streaming, queued, unsent, unanswered]
    may = may_have_run(attempts, max_num_seqs=3)
    assert may == [
        one.record for one in (*streaming, queued, unanswered)
    ]  # one running slot may have been the queued one's
    full = may_have_run(attempts, max_num_seqs=2)
    assert full == [one.record for one in (*streaming, unanswered)]


def test_which_requests_migrate():
    config = FailoverConfig(max_resumes=1, max_lost_workers=3)
    queued, streaming, unsent = Attempt(), Attempt(num_new_tokens=3), Attempt(is_sent=False)
    attempts = [queued, streaming, unsent]

    def lose(cause):
        return after_loss(attempts, cause, config, max_num_seqs=None)

    assert lose("moved").migrating == [streaming, queued, unsent]  # streams that have begun first
    assert [one.record.num_migrations for one in attempts] == [0, 0, 0]
    assert lose("lost").given_up == []
    assert [one.record.num_migrations for one in attempts] == [1, 1, 0]
    assert [one.record.num_losses for one in attempts] == [1, 1, 0]
    decision = lose("torn")
    assert decision.given_up == [streaming, queued]
    assert decision.migrating == [unsent]
    assert [one.record.num_losses for one in attempts] == [1, 1, 0]


@given(st.data())
def test_a_poison_request_costs_two_workers_and_no_other_request(data):
    """Suspects run one by one; the poison request ends each worker that gets it."""
    num_workers, num_requests = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    records = [LossRecord() for _ in range(num_requests)]
    poison = records[data.draw(st.integers(0, num_requests - 1))]
    assert assign_blame(records, max_lost_workers=2) is None
    num_lost, stopped = 1, []
    others: list[list[LossRecord]] = [[LossRecord()] for _ in range(num_workers)]
    for record in data.draw(st.permutations(records)):
        if record in stopped:
            continue
        at = others[data.draw(st.integers(0, num_workers - 1))]
        at.append(record)
        if record is not poison:
            record.release()
            continue
        num_lost += 1
        stopped = [assign_blame(at, max_lost_workers=2)]
    assert stopped == [poison]
    assert num_lost == 2
    assert not any(one.num_losses for group in others for one in group if one is not poison)


def with_suspect(api: Api) -> set[str]:
    """Workers that have a suspect."""
    return {one.worker_id for one in api.router.connections.values() if one.suspect is not None}


def value(api: Api, outcome: str) -> float | None:
    labels = {"model": "stub", "router": "r0", "outcome": outcome}
    return api.router.metrics.registry.get_sample_value("transom_router_failovers_total", labels)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("poison_at", [0, 1, RELEASE_TOKENS, 2 * RELEASE_TOKENS])
async def test_poison_among_many_ends_two_workers_and_itself(poison_at: int, stream: bool) -> None:
    """32 streams; all others get their whole answer."""
    workers = [StubWorker(worker=f"w{i}", poison=POISON, poison_at=poison_at) for i in range(4)]
    async with running_api(*workers, routing_policy="round_robin", failover=FailoverConfig(wait_s=120.0)) as api:
        prompts = ["innocent"] * 20 + ["poison!"] + ["innocent"] * 11
        answers = [asyncio.create_task(api.complete(prompt=p, max_tokens=26, stream=stream)) for p in prompts]
        responses = await asyncio.gather(*answers)
        assert sum(worker.is_dead for worker in workers) == 2
        for prompt, response in zip(prompts, responses, strict=True):
            if prompt == "innocent":
                assert response.status_code == 200
                assert text_of(response.text, stream=stream) == LETTERS
        (stopped,) = [r for p, r in zip(prompts, responses, strict=True) if p == "poison!"]
        if stream and poison_at:
            assert stopped.status_code == 200
            assert "[DONE]" not in stopped.text
            error = json.loads(stopped.text.strip().splitlines()[-1].removeprefix("data: "))["error"]
        else:
            assert stopped.status_code == 500
            error = stopped.json()["error"]
        assert error["code"] == "poison_request"
        assert "2 workers" in error["message"]
        assert value(api, "poison") == 1
        assert value(api, "gave_up") == 0


async def test_poison_that_waits_for_one_worker_to_come_back() -> None:
    """One worker, always replaced: there is no second worker for suspects, so they run one by one."""
    workers = [StubWorker(worker="w0", poison=POISON, poison_at=3)]
    async with running_api(*workers, failover=FailoverConfig(wait_s=120.0)) as api:
        prompts = ["poison!"] + ["innocent"] * 7
        answers = [asyncio.create_task(api.complete(prompt=p, max_tokens=26)) for p in prompts]
        while not all(answer.done() for answer in answers):
            await asyncio.sleep(0)
            if workers[-1].is_dead:
                workers.append(StubWorker(worker=f"w{len(workers)}", poison=POISON, poison_at=3))
                api.directory.add(workers[-1])
        assert [answer.result().status_code for answer in answers] == [500] + [200] * 7
        assert len(workers) == 3


async def test_a_request_that_was_cleared_holds_up_no_other_suspect() -> None:
    """Of two losses one is explained; a request that is cleared of it continues, and a suspect of the other loss may join it."""
    first, second, third, last = (
        StubWorker(worker=f"w{i}", max_events=1, poison=POISON, poison_at=2) for i in range(4)
    )
    config = FailoverConfig(wait_s=120.0)
    async with running_api(first, failover=config) as api:
        innocent, poison = (asyncio.create_task(api.complete(prompt=p, max_tokens=26)) for p in ("innocent", "poison!"))
        await until(lambda: first.num_silent == 2 and first.is_read)
        first.kill()
        api.directory.add(second)
        await until(lambda: second.num_silent == 1 and second.is_read and len(api.router.queue) == 1)
        api.directory.add(third)
        await until(lambda: third.num_silent == 1 and third.is_read)
        assert with_suspect(api) == {"w1", "w2"}
        third.go()
        assert (await poison).status_code == 500
        begun = second.submitted[0]
        second.push(second.event_of(begun, len(begun.resumed_output_ids) + 1, is_last=False))
        await until(lambda: not with_suspect(api))  # long before its eighth token
        second.kill()
        last.go()
        api.directory.add(last)
        assert (await innocent).json()["choices"][0]["text"] == LETTERS


async def test_requests_that_waited_in_the_queue_of_a_lost_worker_go_on_at_once() -> None:
    """Two places, both streaming: the others never ran, and need not be looked at one by one."""
    first, second = (StubWorker(worker=f"w{i}", max_events=1) for i in range(2))
    first.load = WorkerLoad(max_num_seqs=2)
    async with running_api(first, failover=FailoverConfig(wait_s=120.0)) as api:
        streaming = [asyncio.create_task(api.complete(max_tokens=26)) for _ in range(2)]
        await until(lambda: first.num_silent == 2 and first.is_read)
        first.max_events = 0
        queued = [asyncio.create_task(api.complete(max_tokens=26)) for _ in range(6)]
        await until(lambda: first.num_silent == 8)
        second.max_events = 0
        first.kill()
        api.directory.add(second)
        await until(lambda: second.num_silent == 7)  # the queued ones, and one of the two that may have done it
        assert len(api.router.queue) == 1
        second.go()
        for answer in (*streaming, *queued):
            assert (await answer).json()["choices"][0]["text"] == LETTERS


def text_of(text: str, *, stream: bool) -> str:
    if not stream:
        return json.loads(text)["choices"][0]["text"]
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines)
