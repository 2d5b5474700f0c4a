"""What clients can fill in a worker stays within its bound: each place is filled over HTTP, by a router and a worker with a real
engine.

Every cache, queue and table of a worker that keeps what clients send has a row in `worker_bounds`. The rest of a worker's
memory is bounded by the operator's settings (weights, both tiers of KV blocks with their index and what the eviction policy
remembers of them, the disk tier's index and its queue of 64 MiB, transfers in flight), by the number of routers (an outbox has
the net changes of the index), or by the request itself (tokens, log-probabilities, the grammar's masks).
`tests/worker/engine/test_memory.py` counts all containers of an engine, and `tests/end_to_end/test_serve.py` measures
the resident memory of the real processes.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.engine_server import engine_server
from transom_core.config import LimitsConfig
from transom_core.fair_cache import CLIENT_SHARE
from transom_core.telemetry import request_timelines
from transom_core.virtual_time import MAX_ACCOUNTS
from transom_worker.engine.arrivals import MAX_PENDING, MAX_PIECE
from transom_worker.kvcache.policy_retentions import MAX_REMEMBERED
from transom_worker.replica import WorkerReplica

NUM_PLACES = 4 + 8  # max_num_seqs and max_waiting
MAX_TOKENS = 1000  # with which requests may be there
LONGEST = 300  # tokens: the last request before the limit may exceed it by its own
MANY = 60


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
            for i in range(MANY):
                assert await send("hostile", structured_outputs={"regex": f"({i}a)+"}) == 200
                assert await send("hostile", kv_policy={"type": "window", "sinks": 0, "window": 16 + i}) == 200
            assert compiler.num_compiled == num_compiled + MANY
            assert len(compiler._entries) < MANY * CLIENT_SHARE
            assert await send("usual", structured_outputs={"regex": "mine"}) == 200
            assert compiler.num_compiled == num_compiled + MANY  # it was still cached
            # Both at once for several steps, so that the time of some is divided.
            both = [send(key, max_tokens=60, ignore_eos=True) for key in ("hostile", "usual")]
            assert await asyncio.gather(*both) == [200, 200]
            long: dict[str, Any] = {"prompt": list(range(5, 205)), "max_tokens": 100, "ignore_eos": True}
            hostile = [
                asyncio.create_task(send("hostile", 0.05 * (i % 3), structured_outputs={"regex": f"[a-z{i}]+"}, **long))
                for i in range(MANY)
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
