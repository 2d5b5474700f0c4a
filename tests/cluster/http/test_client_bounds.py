"""What clients can fill stays within its bound: each place of a router, and of a worker with a real engine, is filled over HTTP,
beside a client that sends little.

Clients decide what they send and how often (new texts, keys, sizes, bodies), and whether they read their answers. Every table or
queue that keeps such data has a row in `client_bounds` or `worker_bounds`. The rest of a router's memory is bounded by the
operator's settings (keys), the model (the tokenizer's table of tokens; the starts of window repairs, `hit_search.MAX_REPAIRS`), the
workers (prefix index, metrics pages), or the request itself (an answer that is not read: its own tokens). The rest of a worker's
memory is bounded by the operator's settings (weights, both tiers of KV blocks with their index and what the eviction policy
remembers of them, the disk tier's index and its queue of 64 MiB, transfers in flight), by the number of routers (an outbox has the
net changes of the index), or by the request itself (tokens, log-probabilities, the grammar's masks).
`tests/worker/engine/test_engine.py` counts all containers of an engine, and `tests/end_to_end/test_serve.py` measures the resident
memory of the real processes.

A cache gives one client at most a quarter (`FairCache`); bodies give it half. A queue takes a client's new requests until it is
full, and then displaces requests of the client that has most. Sizes are computed from the measured bytes per entry.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.asgi_call import AsgiCall
from tests.cluster.conftest import make_router, running, until
from tests.cluster.engine_server import engine_server
from tests.cluster.stub_worker import ByteTokenizer, StubDirectory, StubWorker
from transom_cluster.http import client_limits
from transom_cluster.http.api import build_api
from transom_cluster.http.client_limits import MAX_IDLE_CLIENTS, ClientLimits, LimitSet
from transom_cluster.router import request_queue
from transom_cluster.router.router import Router
from transom_core.config import FailoverConfig, LimitsConfig
from transom_core.errors import Overloaded, RateLimited
from transom_core.fair_cache import CLIENT_SHARE
from transom_core.grammar import GrammarChecker
from transom_core.telemetry import request_timelines
from transom_core.telemetry.request_timelines import MAX_EVENTS, MAX_TIMELINES
from transom_core.virtual_time import MAX_ACCOUNTS
from transom_worker.engine.arrivals import MAX_PENDING, MAX_PIECE
from transom_worker.kvcache.policy_retentions import MAX_REMEMBERED
from transom_worker.replica import WorkerReplica

NUM_REQUESTS = 60
ENTRY_BYTES = 300  # an entry for a client in a table
EVENT_BYTES = 350  # an event of a timeline
WAITING_REQUEST_BYTES = 8192  # a waiting choice with its deadline and events
TOKEN_BYTES = 36  # a token id: an int object and its place in a tuple
NUM_PLACES = 4 + 8  # max_num_seqs and max_waiting
MAX_TOKENS = 1000  # with which requests may be there
LONGEST = 300  # tokens: the last request before a queue is full may exceed the bound by its own


def client_bounds(router: Router, limits: LimitSet) -> dict[str, tuple[int, Callable[[], int]]]:
    """All places of a router that clients can fill, by name: the bound in bytes, and how many there are now."""
    verdicts, waiting, timelines = router.grammar_checker.kept, router.queue._waiting, router.timelines.store
    tables = [one for part in (limits, limits.work) for one in vars(part).values() if isinstance(one, ClientLimits)]
    max_waiting_tokens = request_queue.MAX_WAITING_TOKENS + LONGEST
    return {
        "bodies of requests that run": (client_limits.HELD_BODY_BYTES, lambda: limits.bodies.num_bytes),
        "verdicts on grammars": (verdicts.max_bytes, lambda: verdicts.num_bytes),
        "requests that wait": (
            request_queue.MAX_WAITING * WAITING_REQUEST_BYTES + max_waiting_tokens * TOKEN_BYTES,
            lambda: len(waiting) * WAITING_REQUEST_BYTES + waiting.num_tokens * TOKEN_BYTES,
        ),
        "timelines": (MAX_TIMELINES * MAX_EVENTS * EVENT_BYTES, lambda: timelines.num_events * EVENT_BYTES),
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


def worker_bounds(replica: WorkerReplica) -> dict[str, tuple[int, Callable[[], int]]]:
    """All places of a worker that clients can fill, by name: the bound, and how much there is now (bytes where not told)."""
    engine, arrivals = replica.engine, replica._thread._arrivals
    scheduler, compiler, timelines = engine.scheduler, engine.grammars.compiler, engine.timelines._store
    clients, copies = scheduler.admission.clients, scheduler.cache.copies
    accounts = [clients._time, compiler._jobs._waiting._time, copies.loads._waiting._time, copies.reads._waiting._time]
    return {
        "sequences": (NUM_PLACES, lambda: len(scheduler.by_request)),
        "tokens of sequences": (MAX_TOKENS + LONGEST, lambda: clients.num_tokens),
        "requests to be added": (MAX_PENDING + MAX_PIECE, lambda: len(arrivals._group_of)),
        "deadlines": (2 * NUM_PLACES + 64, lambda: len(engine._deadlines._heap)),
        "characters of grammars to be compiled": (compiler._jobs._max_chars, lambda: compiler._jobs._num_chars.total()),
        "compiled grammars": (compiler._entries.max_bytes, lambda: compiler.num_bytes),
        "clients that compiled": (compiler._waits_until_s.max_bytes, lambda: compiler._waits_until_s.num_bytes),
        "grammars in use": (compiler._in_use._max_bytes, lambda: compiler._in_use.num_bytes),
        "events of timelines": (request_timelines.MAX_ENDED_EVENTS, lambda: timelines.num_events),
        "KV policies": (MAX_REMEMBERED, lambda: scheduler.policy_retentions._under.cache_info().currsize),
        "accounts of clients": (len(accounts) * MAX_ACCOUNTS, lambda: sum(map(len, accounts))),
        "savings of clients": (MAX_ACCOUNTS, lambda: len(scheduler._planner._shares._time._accounts)),
        "events of the block map": (2 * 300, lambda: len(engine.block_map_log.history._entries)),
    }


async def test_whatever_clients_fill_in_a_worker_stays_within_its_bound(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transom_worker.scheduling.scheduler.MAX_TOKENS", MAX_TOKENS)
    keys = {"api_keys": ("hostile", "usual"), "limits": LimitsConfig(request_timeout_s=600.0)}
    settings: dict[str, Any] = {"max_num_seqs": 4, "max_waiting": 8, "kv_cache_memory_bytes": "4MiB"}
    peaks: Counter[str] = Counter()
    with engine_server(tiny_model, server=keys, **settings) as server:
        compiler = server.replica.engine.grammars.compiler
        compiler._entries.max_bytes = 8 << 20
        bounds = worker_bounds(server.replica)

        def measure() -> None:
            for name, (most, now) in bounds.items():
                peaks[name] = max(peaks[name], count := now())
                assert count <= most, name
            assert compiler._entries.bytes_of("") <= 2 << 20

        async def watch() -> None:
            while True:
                measure()
                await asyncio.sleep(0.001)

        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

            async def send(key: str, patience_s: float = 120, **fields: Any) -> int:
                body = {"model": "tiny", "prompt": "x", "max_tokens": 2, **fields}
                headers = {"authorization": f"Bearer {key}"}
                try:
                    async with asyncio.timeout(patience_s):
                        return (await client.post("/v1/completions", json=body, headers=headers)).status_code
                except TimeoutError:
                    return 0

            watching = asyncio.create_task(watch())
            assert await send("usual", structured_outputs={"regex": "mine"}) == 200
            num_compiled = compiler.num_compiled
            for i in range(NUM_REQUESTS):
                assert await send("hostile", structured_outputs={"regex": f"({i}a)+"}) == 200
                assert await send("hostile", kv_policy={"type": "window", "sinks": 0, "window": 16 + i}) == 200
            assert compiler.num_compiled == num_compiled + NUM_REQUESTS
            assert len(compiler._entries) < NUM_REQUESTS * CLIENT_SHARE
            assert await send("usual", structured_outputs={"regex": "mine"}) == 200
            assert compiler.num_compiled == num_compiled + NUM_REQUESTS  # it was still cached
            # Both at once for several steps, so that the time of some is divided.
            both = [send(key, max_tokens=60, ignore_eos=True) for key in ("hostile", "usual")]
            assert await asyncio.gather(*both) == [200, 200]
            long: dict[str, Any] = {"prompt": list(range(5, 205)), "max_tokens": 100, "ignore_eos": True}
            hostile = [
                asyncio.create_task(send("hostile", 0.05 * (i % 3), structured_outputs={"regex": f"[a-z{i}]+"}, **long))
                for i in range(NUM_REQUESTS)
            ]
            hostile += [asyncio.create_task(send("hostile", n=6, **long)) for _ in range(6)]
            assert await send("usual") == 200
            await asyncio.gather(*hostile)
            await server.until_quiet()
            watching.cancel()
            await asyncio.wait([watching])
            assert watching.cancelled()
            measure()
            assert compiler._in_use.num_bytes == compiler._jobs._num_chars.total() == len(compiler._jobs) == 0
    # Groups are added within a moment if there is room, and refused within one if there is none.
    assert [name for name in bounds if not peaks[name]] in ([], ["requests to be added"]), "a row that is not filled"
