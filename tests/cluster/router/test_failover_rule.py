"""Which request is to blame for a lost worker: the rule by itself, and a poison request among innocent streams."""

import asyncio
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tests.cluster.conftest import PATIENT, Api, running_api, sample, sent_events, timings, until
from tests.cluster.stub_worker import LETTERS, StubWorker, stub_workers
from tests.matrices import some_daily
from transom_cluster.router.failover import (
    RELEASE_TOKENS,
    LossRecord,
    LossReport,
    after_loss,
    assign_blame,
    may_have_run,
)
from transom_core.config import FailoverConfig
from transom_core.contract import ErrorInfo
from transom_core.errors import LossCause, WorkerLost

POISON = ord("!")


@dataclass
class Attempt:
    record: LossRecord = field(default_factory=LossRecord)
    is_sent: bool = True
    awaits_reply: bool = False
    num_new_tokens: int = 0


STRONG, WEAK = LossReport(cause="exception"), LossReport()


def blame(*attempts: Attempt, report: LossReport = STRONG, most: int = 3) -> LossRecord | None:
    return assign_blame(attempts, report, max_lost_workers=most).culprit


def test_the_suspect_is_named_and_the_others_are_cleared():
    attempts = [Attempt() for _ in range(32)]
    first = assign_blame(attempts, STRONG, max_lost_workers=2)
    assert first.culprit is None
    assert first.suspected == [one.record for one in attempts]
    attempts[3].record.release()  # it brought more tokens
    bystanders = [Attempt(num_new_tokens=RELEASE_TOKENS), Attempt(attempts[3].record, num_new_tokens=RELEASE_TOKENS)]
    second = assign_blame([*bystanders, attempts[7]], STRONG, max_lost_workers=2)
    assert second.culprit is attempts[7].record
    innocent = [one.record for one in (*attempts[:7], *attempts[8:], *bystanders)]
    assert set(second.cleared) == {one.record for one in (*attempts[:3], *attempts[4:7], *attempts[8:])}
    assert not any(record.is_suspect or record.num_losses for record in innocent)


def test_suspects_that_were_lost_together_are_not_stopped():
    pair = [Attempt(), Attempt()]
    for _ in range(5):
        assert blame(*pair) is None
    assert [blame(pair[0]) for _ in range(2)] == [None, pair[0].record]
    assert pair[1].record.num_losses == 0


def test_a_suspect_beside_a_request_without_progress_is_not_stopped():
    """The other one may have ended the worker: both run again, and alone."""
    suspect, fresh = Attempt(), Attempt(num_new_tokens=RELEASE_TOKENS - 1)
    blame(suspect, most=2)
    assert blame(suspect, fresh, most=2) is None
    assert suspect.record.is_suspect
    assert fresh.record.is_suspect
    assert blame(fresh, most=2) is fresh.record
    assert suspect.record.num_losses == 1


def test_losses_without_a_known_cause_count_from_the_third_on():
    one, others = Attempt(), [Attempt() for _ in range(3)]
    for _ in range(2):
        assert blame(one, *others, report=WEAK) is None
        assert not one.record.is_suspect
    others[0].record.release()
    assert blame(one, others[0], report=WEAK) is None
    assert one.record.is_suspect
    assert not others[0].record.is_suspect
    assert [blame(one, report=WEAK) for _ in range(2)] == [None, one.record]
    assert one.record.num_losses == 5


def test_a_request_that_only_waited_is_not_to_blame():
    streaming = [Attempt(num_new_tokens=3) for _ in range(2)]
    queued, unsent, unanswered = Attempt(), Attempt(is_sent=False), Attempt(awaits_reply=True)
    attempts = [*streaming, queued, unsent, unanswered]
    # One running slot may have been the queued one's.
    assert may_have_run(attempts, max_num_seqs=3) == [*streaming, queued, unanswered]
    assert may_have_run(attempts, max_num_seqs=2) == [*streaming, unanswered]


def test_which_requests_migrate():
    config = FailoverConfig(max_resumes=1, max_lost_workers=3)
    queued, streaming, unsent = Attempt(), Attempt(num_new_tokens=3), Attempt(is_sent=False)
    attempts = [queued, streaming, unsent]

    def lose(cause):
        return after_loss(attempts, cause, config, STRONG)

    assert lose("moved").migrating == [streaming, queued, unsent]  # streams that have begun first
    assert [one.record.num_migrations for one in attempts] == [0, 0, 0]
    assert lose("lost").given_up == []
    assert [(one.record.num_migrations, one.record.num_losses) for one in attempts] == [(1, 1), (1, 1), (0, 0)]
    decision = lose("torn")
    assert (decision.given_up, decision.migrating) == ([streaming, queued], [unsent])
    assert [one.record.num_losses for one in attempts] == [1, 1, 0]


@given(st.data())
def test_a_poison_request_costs_three_workers_and_no_other_request(data):
    """Suspects run one by one; the poison request ends each worker that gets it."""
    num_workers, num_requests = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    requests = [Attempt() for _ in range(num_requests)]
    poison = requests[data.draw(st.integers(0, num_requests - 1))]
    assert blame(*requests) is None
    num_lost, culprit = 1, None
    others: list[list[Attempt]] = [[Attempt(num_new_tokens=RELEASE_TOKENS)] for _ in range(num_workers)]
    for request in data.draw(st.permutations(requests)):
        at = others[data.draw(st.integers(0, num_workers - 1))]
        while request is poison and culprit is None:
            num_lost += 1
            culprit = blame(*at, request)
        if request is not poison and culprit is None:
            request.record.release()
            at.append(Attempt(request.record, num_new_tokens=RELEASE_TOKENS))
    assert culprit is poison.record
    assert num_lost == 3
    assert not any(one.record.num_losses for group in (*others, requests) for one in group if one is not poison)


def with_suspect(api: Api) -> set[str]:
    """Workers that have a suspect."""
    return {one.worker_id for one in api.router.connections.values() if one.suspect is not None}


@pytest.mark.parametrize(("cause", "num_lost"), [("exception", 3), ("unknown", 5)])
@pytest.mark.parametrize(
    ("poison_at", "stream"),
    some_daily(
        product((0, 1, RELEASE_TOKENS, 2 * RELEASE_TOKENS), (False, True)),
        daily=[(0, False), (0, True), (1, True), (RELEASE_TOKENS, False), (2 * RELEASE_TOKENS, True)],
    ),
)
async def test_poison_among_many_ends_few_workers_and_itself(
    poison_at: int, stream: bool, cause: LossCause, num_lost: int
) -> None:
    """32 streams; all others get their whole answer."""
    workers = stub_workers(6, poison=POISON, poison_at=poison_at, poison_cause=cause)
    async with running_api(*workers, routing_policy="round_robin", **PATIENT) as api:
        prompts = ["innocent"] * 20 + ["poison!"] + ["innocent"] * 11
        answers = [asyncio.create_task(api.complete(prompt=p, max_tokens=26, stream=stream)) for p in prompts]
        responses = await asyncio.gather(*answers)
        assert sum(worker.is_dead for worker in workers) == num_lost
        for prompt, response in zip(prompts, responses, strict=True):
            if prompt == "innocent":
                assert response.status_code == 200
                events = sent_events(response.text) if stream else [response.json()]
                assert "".join(event["choices"][0]["text"] for event in events) == LETTERS
        (stopped,) = [r for p, r in zip(prompts, responses, strict=True) if p == "poison!"]
        has_begun = stream and poison_at > 0
        assert stopped.status_code == (200 if has_begun else 500)
        assert "[DONE]" not in stopped.text
        error = sent_events(stopped.text)[-1]["error"] if has_begun else stopped.json()["error"]
        assert error["code"] == "poison_request"
        assert f"{num_lost} workers" in error["message"]
        assert sample(api.router, "failovers_total", outcome="poison") == 1
        assert sample(api.router, "failovers_total", outcome="gave_up") == 0
        assert sample(api.router, "worker_losses_total", cause=cause) == num_lost
        judged = {
            name: sample(api.router, "suspects_total", judgement=name) or 0.0
            for name in ("suspected", "released", "cleared", "culprit")
        }
        assert judged["culprit"] == 1
        assert sum(judged.values()) == 2 * judged["suspected"]


async def test_a_request_that_was_cleared_holds_up_no_other_suspect() -> None:
    """Of two losses one is explained; a request that is cleared of it continues, and a suspect of the other loss may join it."""
    first, second, third, last = stub_workers(4, max_events=1, poison=POISON, poison_at=2)
    async with running_api(first, failover=FailoverConfig(wait_s=120.0, max_lost_workers=2)) as api:
        innocent, poison = (asyncio.create_task(api.complete(prompt=p, max_tokens=26)) for p in ("innocent", "poison!"))
        await until(lambda: first.num_silent == 2 and first.is_read)
        first.kill("exception")
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


async def test_two_routers_that_lose_a_shared_worker_twice_stop_no_request() -> None:
    """Each router had one request there, alone as far as it knows: the worker says how many of all routers it lost."""
    shares = [StubWorker(max_events=1) for _ in range(2)]
    config: dict[str, Any] = {
        "failover": FailoverConfig(wait_s=120.0, max_lost_workers=2),
        "timings": timings(retry_s=0.001, cooldown_s=0.001),
    }
    async with running_api(shares[0], **config) as first, running_api(shares[1], **config) as second:
        answers = [asyncio.create_task(api.complete(max_tokens=26)) for api in (first, second)]
        for _ in range(2):
            await until(lambda: all(one.num_running and one.num_silent == len(one.submitted) for one in shares))
            await until(lambda: all(one.is_read for one in shares))
            assert sum(share.num_running for share in shares) == 2
            lost = ErrorInfo.of(WorkerLost("A rank died.", loss_cause="exception", num_lost=2))
            for share in shares:
                share.end_all(lost)
        for share in shares:
            share.go()
        for api, answer in zip((first, second), answers, strict=True):
            assert (await answer).json()["choices"][0]["text"] == LETTERS
            assert sample(api.router, "worker_losses_total", cause="exception") == 2
            assert sample(api.router, "suspects_total", judgement="culprit") == 0


@pytest.mark.parametrize(
    ("cause", "num_at_once"), [("unknown", 8), ("killed", 8), ("host_lost", 8), ("stopped", 8), ("exception", 1)]
)
async def test_streams_go_on_at_once_unless_a_request_may_be_to_blame(cause: LossCause, num_at_once: int) -> None:
    """Where one worker is left, quarantine would have the streams continue one by one."""
    first, second = stub_workers(2, max_events=1)
    async with running_api(first, **PATIENT) as api:
        answers = [asyncio.create_task(api.complete(max_tokens=26)) for _ in range(8)]
        await until(lambda: first.num_silent == 8 and first.is_read)
        first.kill(cause)
        api.directory.add(second)
        await until(lambda: second.num_silent == num_at_once and second.is_read)
        assert len(api.router.queue) == 8 - num_at_once
        second.go()
        for answer in answers:
            assert (await answer).json()["choices"][0]["text"] == LETTERS
