"""Clients take turns at a router's queue: many requests of one delay another's by its share, and are placed in pieces.

Days of traffic: nothing in a router grows with the number of requests, clients or workers that it has ever seen.
"""

import asyncio
from functools import partialmethod
from typing import Any

import pytest

from tests.cluster.conftest import Api, running_api, timings, until
from tests.cluster.stub_worker import StubWorker
from tests.container_sizes import container_sizes, growth
from tests.how_many import num_examples
from transom_cluster.router import request_queue
from transom_cluster.router.client_turns import SEQUENCE_TOKENS, TurnQueue, WaitingRequests, charge
from transom_cluster.router.in_flight_requests import InFlightRequest
from transom_cluster.router.output_stream import OutputStream
from transom_core.config import FailoverConfig, LimitsConfig
from transom_core.contract import ErrorInfo, Request, SamplingParams
from transom_core.errors import Overloaded
from transom_core.telemetry import request_timelines
from transom_core.virtual_time import MAX_ACCOUNTS, VirtualTime

TWO_CLIENTS: dict[str, Any] = {"api_keys": ("attacker", "victim"), "failover": FailoverConfig(wait_s=3600)}
AT_ONCE = 20
NUM_REQUESTS = num_examples(daily=300, exhaustive=50_000)
NUM_KEYS = 50


class ShareWorker(StubWorker):
    """Refuses one client, which has its share. `clients` has those of each submission."""

    refused_client: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.clients: list[set[str]] = []

    async def submit(self, router_id: str, requests: list[Request]) -> list[ErrorInfo | None]:
        self.clients.append({request.client for request in requests})
        full = ErrorInfo.of(Overloaded("full"))
        refusals = [full if request.client == self.refused_client else None for request in requests]
        return refusals if any(refusals) else await super().submit(router_id, requests)


def complete_as(api: Api, key: str, **fields: Any) -> asyncio.Task[Any]:
    headers, body = {"authorization": f"Bearer {key}"}, {"prompt": "x", "max_tokens": 1, **fields}
    return asyncio.create_task(api.client.post("/v1/completions", json=body, headers=headers))


def made(client: str, *, tokens: int = 1, weight: float = 1.0, priority: int = 0, resumed: int = 0) -> InFlightRequest:
    request = Request(
        request_id=client,
        prompt_token_ids=(1,) * tokens,
        params=SamplingParams(),
        seed=1,
        client=client,
        client_weight=weight,
        priority=priority,
        resumed_output_ids=(1,) * resumed,
    )
    return InFlightRequest(OutputStream([request]), 0, request)


def clients_of(requests: list[InFlightRequest]) -> str:
    return "".join(request.original.client for request in requests)


def queue_of(turns: VirtualTime, requests: list[InFlightRequest]) -> TurnQueue:
    queue = TurnQueue(turns, "priority")
    for request in requests:
        queue.add(request)
    return queue


def test_clients_take_turns_by_sequences_and_tokens() -> None:
    queue = queue_of(VirtualTime(), [made("a") for _ in range(6)] + [made("b") for _ in range(3)])
    assert clients_of(queue.take(4)) == "abab"
    assert clients_of(queue.take(9)) == "abaaa"
    assert not queue
    long = [made("a", tokens=3 * SEQUENCE_TOKENS) for _ in range(2)]
    assert clients_of(queue_of(VirtualTime(), [*long, *(made("b") for _ in range(6))]).take(9)) == "abbbbabb"


def test_a_weight_is_a_share_and_priorities_count_inside_it() -> None:
    queue = queue_of(VirtualTime(), [*(made("a") for _ in range(4)), *(made("b", weight=2.0) for _ in range(8))])
    assert clients_of(queue.take(6)).count("b") == 4
    first, last = made("a", priority=4), made("a", priority=-4)
    assert queue_of(VirtualTime(), [first, last]).take(2) == [last, first]


def test_streams_that_have_begun_go_first() -> None:
    queue = queue_of(VirtualTime(), [made("a"), made("b", resumed=3), made("b", resumed=3), made("c", resumed=1)])
    assert clients_of(queue.take(4)) == "bcba"


def test_a_turn_does_not_look_at_every_client(monkeypatch: pytest.MonkeyPatch) -> None:
    num_looks = 0
    own_account = VirtualTime.own_account

    def noted(turns: VirtualTime, client: str) -> float:
        nonlocal num_looks
        num_looks += 1
        return own_account(turns, client)

    turns = VirtualTime()
    queue = queue_of(turns, [made(f"client {i}") for i in range(500) for _ in range(2)])
    monkeypatch.setattr(VirtualTime, "own_account", noted)
    taken = queue.take(32)
    assert len({request.original.client for request in taken}) == 32
    assert num_looks <= 4 * 32
    for request in taken:
        charge(turns, request)
    rest = queue.take(1000)
    assert len({request.original.client for request in rest[:468]}) == 468
    assert len(rest) == 968
    assert not queue


def test_a_clients_place_is_corrected_when_it_comes_up() -> None:
    """Its account has grown elsewhere, or a request has come that goes before its others."""
    turns = VirtualTime()
    queue = queue_of(turns, [made("a"), made("b")])
    charge(turns, made("a"))
    urgent = made("b", priority=-4)
    queue.add(urgent)
    first, *others = queue.take(3)
    assert first is urgent
    assert sorted(clients_of(others)) == ["a", "b"]


def test_what_was_placed_counts_later_and_a_pause_saves_up_nothing() -> None:
    turns = VirtualTime()
    for request in (many := [made("a") for _ in range(50)]):
        charge(turns, request)
    assert clients_of(queue_of(turns, [made("a"), made("a"), made("b")]).take(3)) == "baa"
    for _ in range(3):
        charge(turns, made("b"))
    order = clients_of(queue_of(turns, [*many[:5], *(made("b") for _ in range(5))]).take(10))
    assert "bbb" not in order  # b has not been there for 50 turns, and gets no 50 turns for it
    for i in range(2 * MAX_ACCOUNTS):
        charge(turns, made(f"client {i}"))
    assert len(turns) <= MAX_ACCOUNTS


def displaced_for(waiting: WaitingRequests, newcomer: InFlightRequest) -> InFlightRequest | None:
    return waiting.one_to_displace(newcomer, max_requests=100, max_tokens=1000)


def test_a_full_queue_displaces_the_newest_of_the_client_with_most() -> None:
    waiting = WaitingRequests()
    attacking = [made("a") for _ in range(5)]
    for request in attacking:
        waiting.add(request)
    assert displaced_for(waiting, made("a")) is None
    assert displaced_for(waiting, made("b")) is attacking[-1]
    attacking[-1].was_accepted = True  # a stream that migrates always waits
    assert displaced_for(waiting, made("b")) is attacking[-2]
    assert len(waiting) == len(list(waiting)) == 5
    waiting.discard(attacking[0])
    waiting.discard(attacking[0])
    waiting.add(attacking[1])
    assert len(waiting) == len(list(waiting)) == 4
    assert attacking[0] not in waiting


def test_a_queue_that_is_full_of_tokens_displaces_who_has_most_tokens() -> None:
    waiting = WaitingRequests()
    long, short = [made("a", tokens=450) for _ in range(2)], [made("b", tokens=2) for _ in range(50)]
    for request in [*long, *short]:
        waiting.add(request)
    assert displaced_for(waiting, made("c")) is long[-1]
    assert displaced_for(waiting, made("b")) is long[-1]
    assert displaced_for(waiting, made("a")) is None
    assert displaced_for(waiting, made("c", tokens=950)) is None
    assert displaced_for(waiting, made("c", tokens=950, weight=2.0)) is long[-1]
    for request in long:
        request.was_accepted = True  # the client with most has only streams that migrate: the next one makes room
    assert displaced_for(waiting, made("c")) is short[-1]
    for request in [*long, *short]:
        waiting.discard(request)
    assert (len(waiting), waiting.num_tokens) == (0, 0)
    assert displaced_for(waiting, made("c")) is None


async def test_a_large_group_is_placed_in_pieces_between_which_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 placements at once held the event loop for a second."""
    pieces: list[list[str]] = []
    async with running_api(api_keys=("attacker", "victim")) as api:
        place = api.router.queue._place

        def noted(requests: Any) -> None:
            requests = list(requests)
            pieces.append([request.original.client for request in requests])
            place(requests)

        monkeypatch.setattr(api.router.queue, "_place", noted)
        async with asyncio.timeout(60):
            answers = [complete_as(api, "attacker", prompt=["x"] * 128), complete_as(api, "victim")]
            assert [(await answer).status_code for answer in answers] == [200, 200]
    victim = next(client for piece in pieces for client in piece if client != pieces[0][0])
    placed = [piece for piece in pieces if piece]
    assert max(len(piece) for piece in placed) <= request_queue.MAX_PLACED_AT_ONCE
    assert sum(len(piece) for piece in placed) == 129
    assert any(victim in piece for piece in placed[:-1])


async def test_retries_during_a_sweep_do_not_keep_it_from_its_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """They began again at the first request, so that those after the first 100 or so were never tried."""
    async with running_api(failover=FailoverConfig(wait_s=3600), timings=timings(retry_s=3600.0)) as api:
        queue = api.router.queue
        api.directory.remove(api.worker)
        await until(lambda: not api.router.connections)
        answer = asyncio.create_task(api.complete(prompt=["x"] * 100, max_tokens=1))
        await until(lambda: len(queue) == 100 and queue._placing is None)
        tried, place = set(), queue._place

        def noted(requests: Any) -> None:
            requests = list(requests)
            tried.update(requests)
            place(requests)

        monkeypatch.setattr(queue, "_place", noted)
        for _ in range(20):
            queue._on_retry()
            await asyncio.sleep(0)
        assert len(tried) == 100
        api.directory.add(api.worker)
        assert (await answer).status_code == 200


async def test_a_client_that_is_refused_takes_no_other_with_it() -> None:
    """Their requests were one submission, which the worker accepts or refuses as a whole."""
    async with running_api(**TWO_CLIENTS) as api:
        api.directory.remove(api.worker)
        await until(lambda: not api.router.connections)
        attacking = complete_as(api, "attacker")
        await until(lambda: len(api.router.queue) == 1)
        attacker = next(iter(api.router.queue._waiting)).original.client
        victims = [complete_as(api, "victim") for _ in range(2)]
        await until(lambda: len(api.router.queue) == 3)
        worker = ShareWorker(worker="w1")
        worker.refused_client = attacker
        api.directory.add(worker)
        assert [(await victim).status_code for victim in victims] == [200, 200]
        assert (await attacking).status_code == 503
        assert sorted(len(clients) for clients in worker.clients) == [1, 1]


async def test_a_worker_that_refuses_one_client_is_asked_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's stream waits, because the only worker left has refused it until the next retry."""
    first, other = StubWorker(max_events=2), ShareWorker(worker="w1", can_open=False)
    async with running_api(first, other, timings=timings(retry_s=3600.0, silence_s=3600.0), **TWO_CLIENTS) as api:
        attacking = complete_as(api, "attacker", max_tokens=6)
        await until(lambda: first.num_silent and first.is_read)
        other.refused_client = first.submitted[0].client
        other.can_open = True
        await until(lambda: api.router.connections["w1"].is_open)
        first.kill()
        await until(lambda: other.clients and api.router.queue._refusing)
        waiting, wait = set(), api.router.queue._wait

        def noted(request: InFlightRequest, **reasons: bool) -> None:
            waiting.add(request.original.client)
            wait(request, **reasons)

        monkeypatch.setattr(api.router.queue, "_wait", noted)
        victim = complete_as(api, "victim")
        await until(lambda: victim.done() or waiting)
        assert not waiting - {other.refused_client}
        assert (await victim).status_code == 200
        other.refused_client = None
        api.router.queue._on_retry()
        assert (await attacking).json()["choices"][0]["text"] == "abcdef"


async def test_many_short_prompts_make_room_where_the_queue_is_full_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """One displaced request for each newcomer let the queue grow past its bound."""
    monkeypatch.setattr(request_queue, "MAX_WAITING_TOKENS", 20)
    async with running_api(**TWO_CLIENTS) as api:
        api.directory.remove(api.worker)
        await until(lambda: not api.router.connections)
        attacking = [complete_as(api, "attacker") for _ in range(20)]
        await until(lambda: len(api.router.queue) == 20)
        victims = [complete_as(api, "victim", prompt="four") for _ in range(2)]
        await until(lambda: sum(answer.done() for answer in attacking) == 5)
        assert api.router.queue._waiting.num_tokens == 15 + 8
        api.directory.add(api.worker)
        assert [(await victim).status_code for victim in victims] == [200, 200]
        assert sorted([(await answer).status_code for answer in attacking]) == [200] * 15 + [503] * 5


async def serve(api: Api, begin: int, end: int) -> None:
    """Requests of many clients: complete, wrong, refused; and workers that come and go."""
    for first in range(begin, end, AT_ONCE):
        refusal = ErrorInfo.of(Overloaded("full")) if first % 3 else None
        worker = StubWorker(worker=f"w-{first}", admission_error=refusal)
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
    init = partialmethod(request_timelines.TimelineStore.__init__, max_timelines=100, max_ended_events=200)
    monkeypatch.setattr(request_timelines.TimelineStore, "__init__", init)
    keys = tuple(f"key-{number}" for number in range(NUM_KEYS))
    limits = LimitsConfig(requests_per_minute=10**6, concurrent_requests=1000, request_timeout_s=3600.0)
    async with running_api(api_keys=keys, limits=limits, timings=timings(drain_s=0.0)) as api:
        await serve(api, 0, NUM_REQUESTS)
        api.worker.submitted.clear()
        before = container_sizes(api.router)
        await serve(api, NUM_REQUESTS, 3 * NUM_REQUESTS)
        api.worker.submitted.clear()
        assert growth(before, container_sizes(api.router), least=2 * NUM_REQUESTS // AT_ONCE // 2) == {}
