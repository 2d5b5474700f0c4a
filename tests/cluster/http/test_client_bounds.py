"""What clients can fill stays within its bound: each place is filled over HTTP, beside a client that sends little.

Clients decide what they send and how often (new texts, keys, sizes, bodies), and whether they read their answers. Every table or
queue that keeps such data has a row in `client_bounds`. The rest of a router's memory is bounded by the operator's settings (keys),
the model (the tokenizer's table of tokens; the starts of window repairs, `hit_search.MAX_REPAIRS`), the workers (prefix index,
metrics pages), or the request itself (an answer that is not read: its own tokens).

A cache gives one client at most a quarter (`FairCache`); bodies give it half. A queue takes a client's new requests until it is
full, and then displaces requests of the client that has most. Sizes are computed from the measured bytes per entry.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.cluster.asgi_call import AsgiCall
from tests.cluster.conftest import make_router, running, until
from tests.cluster.stub_worker import ByteTokenizer, StubDirectory, StubWorker
from transom_cluster.http import client_limits
from transom_cluster.http.api import build_api
from transom_cluster.http.client_limits import MAX_IDLE_CLIENTS, ClientLimits, LimitSet
from transom_cluster.router import request_queue
from transom_cluster.router.router import Router
from transom_core.config import FailoverConfig
from transom_core.errors import Overloaded, RateLimited
from transom_core.grammar import GrammarChecker
from transom_core.telemetry.request_timelines import MAX_EVENTS, MAX_TIMELINES
from transom_core.virtual_time import MAX_ACCOUNTS

NUM_REQUESTS = 60
ENTRY_BYTES = 300  # an entry for a client in a table
EVENT_BYTES = 350  # an event of a timeline
WAITING_REQUEST_BYTES = 8192  # a waiting choice with its deadline and events
TOKEN_BYTES = 36  # a token id: an int object and its place in a tuple
LONGEST_PROMPTS = 300  # tokens: the last request before the queue is full may exceed the bound by its prompts


def client_bounds(router: Router, limits: LimitSet) -> dict[str, tuple[int, Callable[[], int]]]:
    """All places of a router that clients can fill, by name: the bound in bytes, and how many there are now."""
    verdicts, waiting = router.grammar_checker.kept, router.queue._waiting
    tables = [one for part in (limits, limits.work) for one in vars(part).values() if isinstance(one, ClientLimits)]
    max_waiting_tokens = request_queue.MAX_WAITING_TOKENS + LONGEST_PROMPTS
    waiting_bytes = request_queue.MAX_WAITING * WAITING_REQUEST_BYTES + max_waiting_tokens * TOKEN_BYTES
    return {
        "bodies of requests that run": (client_limits.HELD_BODY_BYTES, lambda: limits.bodies.num_bytes),
        "verdicts on grammars": (verdicts.max_bytes, lambda: verdicts.num_bytes),
        "requests that wait": (
            waiting_bytes,
            lambda: len(waiting) * WAITING_REQUEST_BYTES + waiting.num_tokens * TOKEN_BYTES,
        ),
        "timelines": (
            MAX_TIMELINES * MAX_EVENTS * EVENT_BYTES,
            lambda: router.timelines.store.num_events * EVENT_BYTES,
        ),
        "accounts of clients": (MAX_ACCOUNTS * ENTRY_BYTES, lambda: len(router.queue._turns) * ENTRY_BYTES),
        "limits of clients": (
            len(tables) * (MAX_IDLE_CLIENTS + 1) * ENTRY_BYTES,
            lambda: sum(len(table._clients) for table in tables) * ENTRY_BYTES,
        ),
    }


class RefusingChildren:
    """Refuses every grammar, with a text as long as the library's."""

    num_asked = 0

    def ask(self, task: dict[str, Any], *, is_patient: bool) -> dict[str, Any]:
        self.num_asked += 1
        return {"refused": "x" * 340}

    def close(self) -> None:
        pass


async def test_whatever_clients_fill_stays_within_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_queue, "MAX_WAITING", 12)
    monkeypatch.setattr(request_queue, "MAX_WAITING_TOKENS", 500)
    monkeypatch.setattr(client_limits, "HELD_BODY_BYTES", 40_000)
    worker, checker = StubWorker(), GrammarChecker(ByteTokenizer())  # type: ignore[arg-type]
    children = checker._children = RefusingChildren()  # type: ignore[assignment]
    directory = StubDirectory(worker)
    router = make_router(directory=directory, api_keys=("hostile", "usual"), failover=FailoverConfig(wait_s=60))
    router.grammar_checker = checker
    checker.kept.max_bytes = 16_000
    app = build_api(router)
    bounds = client_bounds(router, app.state.limits)
    peaks: Counter[str] = Counter()

    def measure() -> None:
        for name, (max_bytes, num_bytes) in bounds.items():
            assert num_bytes() <= max_bytes, name
            peaks[name] = max(peaks[name], num_bytes())
        assert all(checker.kept.bytes_of(one) <= checker.kept.max_bytes / 4 for one in checker.kept._by_client)

    async def send(client: httpx.AsyncClient, key: str, **fields: Any) -> int:
        headers, body = {"authorization": f"Bearer {key}"}, {"prompt": "x", "max_tokens": 1, **fields}
        response = await client.post("/v1/completions", json=body, headers=headers)
        measure()
        return response.status_code

    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with running(router, 1), httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        mine = {"structured_outputs": {"regex": "mine"}}
        assert await send(client, "usual", **mine) == 400
        for i in range(NUM_REQUESTS):
            assert await send(client, "hostile", prompt=f"prompt {i}") == 200
            assert await send(client, "hostile", structured_outputs={"regex": f"{i}"}) == 400
        num_asked = children.num_asked
        assert await send(client, "usual", **mine) == 400
        assert children.num_asked == num_asked == NUM_REQUESTS + 1  # its verdict was kept

        directory.remove(worker)
        await until(lambda: not router.connections)
        hostile = [asyncio.create_task(send(client, "hostile", prompt="x" * 50)) for _ in range(40)]
        await until(lambda: sum(task.done() for task in hostile) == 30)  # 500 tokens wait
        usual = asyncio.create_task(send(client, "usual"))
        await until(lambda: sum(task.done() for task in hostile) == 31)
        measure()
        directory.add(worker)
        assert await usual == 200
        assert Counter(await asyncio.gather(*hostile)) == {503: 31, 200: 9}
        # Bodies that are half sent: one client alone holds half of 40,000 bytes.
        headers = {"authorization": "Bearer hostile"}
        sent = [AsgiCall(app, "/v1/completions", {}, headers, body_so_far=b"x" * 11_000) for _ in range(2)]
        await sent[1].ended()
        measure()
        assert (sent[0].status, sent[1].status) == (None, 429)
        assert await send(client, "usual") == 200
        await sent[0].leave()
        measure()
        assert await send(client, "hostile") == 200
    assert not [name for name in bounds if not peaks[name]], "a row that is not filled"


def test_bodies_of_all_clients_are_bounded_as_well() -> None:
    bodies = client_limits.HeldBodies(100)
    bodies.add("a", 50)  # while it is alone
    with pytest.raises(RateLimited):
        bodies.add("a", 1)
    bodies.remove("a", 1)
    for client in "bc":
        bodies.add(client, 25)
    with pytest.raises(Overloaded):
        bodies.add("d", 1)
    bodies.remove("d", 1)
    for client, num_bytes in {"a": 50, "b": 25, "c": 25}.items():
        bodies.remove(client, num_bytes)
    assert bodies.num_bytes == 0
    assert not bodies._by_client
