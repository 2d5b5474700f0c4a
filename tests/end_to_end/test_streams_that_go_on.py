"""Streams outlive what computes them: killed ranks and workers, redeploys; two routers that know the same.

One server: two workers of two ranks, two routers. Every disturbance strikes while 32 streams run, and every client gets, on the
same connection, the text of an undisturbed run. test_streams_every_day.py is the daily form, with fewer processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.server import (
    PATIENCE_S,
    Server,
    assert_ended_cleanly,
    look_until,
    replica_pids,
    start_server,
    stop_server,
    wait_for_replicas,
)
from tests.end_to_end.streams import Stream, ask_all, bodies
from tests.end_to_end.two_routers import (
    check_answers,
    check_pages,
    check_prefixes,
    page_of,
    redeploy_under_load,
    replicas,
    wait_for_ranks,
    wait_for_workers,
    worker_changes,
)

pytestmark = [pytest.mark.exhaustive, pytest.mark.serve, pytest.mark.timeout(1200)]

MAX_TOKENS = 100
REQUESTS = bodies(32, max_tokens=MAX_TOKENS)
LONGEST_PAUSE_S = 6.0  # between two kills
PAUSE_S = 3.0  # of a client between two answers, while new processes start on the cores that answer
SETTINGS = {
    "kv_cache_memory_bytes": "16MiB",
    "replicas": 2,
    "tensor_parallel_size": 2,
    "router_replicas": 2,
    "worker_wait_s": PATIENCE_S,  # both workers may start again at once
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    flags = [text for name, value in SETTINGS.items() for text in ("--" + name.replace("_", "-"), str(value))]
    server = start_server(str(tiny_model), tmp_path_factory.mktemp("failover") / "log", *flags)
    yield server
    assert_ended_cleanly(server, stop_server(server))


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[Stream]:
    wait_for_workers(server, 2)
    streams = asyncio.run(ask_all(server.url, REQUESTS))
    assert len({stream.text for stream in streams}) == len(streams)
    check_answers(streams, streams, MAX_TOKENS)
    return streams


def test_a_killed_rank_costs_nobody_an_answer(server: Server, undisturbed: list[Stream]) -> None:
    victim, *_ = wait_for_replicas(server, "RankActor", 4)
    streams = asyncio.run(ask_all(server.url, REQUESTS, lambda: os.kill(victim, signal.SIGKILL)))
    check_answers(streams, undisturbed, MAX_TOKENS)
    wait_for_ranks(server, 4, without=victim)
    wait_for_workers(server, 2)


def test_a_killed_worker_costs_nobody_an_answer(server: Server, undisturbed: list[Stream]) -> None:
    workers = wait_for_workers(server, 2)
    victim, _ = wait_for_replicas(server, ":Worker", 2)
    streams = asyncio.run(ask_all(server.url, REQUESTS, lambda: os.kill(victim, signal.SIGKILL)))
    check_answers(streams, undisturbed, MAX_TOKENS)
    wait_for_replicas(server, ":Worker", 2, without=victim)
    wait_for_workers(server, 2, other_than=workers)


@pytest.mark.parametrize("seed", range(4))
def test_random_kills_of_workers_and_ranks_cost_no_answer(server: Server, undisturbed: list[Stream], seed: int) -> None:
    """Two to four kills, a few seconds apart: none of them makes a poison request of a stream.

    test_kill_sequences.py has hundreds of such sequences, with stub workers.
    """
    rng = random.Random(seed)
    wait_for_workers(server, 2)
    wait_for_replicas(server, "RankActor", 4)

    def strike() -> None:
        for _ in range(rng.randint(2, 4)):
            if victims := replica_pids(server, rng.choice(["RankActor", "RankActor", ":Worker"])):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rng.choice(victims), signal.SIGKILL)
            time.sleep(rng.uniform(0, LONGEST_PAUSE_S))

    streams = asyncio.run(ask_all(server.url, REQUESTS, lambda: threading.Thread(target=strike).start()))
    check_answers(streams, undisturbed, MAX_TOKENS)
    wait_for_workers(server, 2)
    suspects = page_of(server)["transom_router_suspects"]
    assert sum(sample.value for sample in suspects if sample.labels["judgement"] == "culprit") == 0


def test_a_crash_is_the_same_to_every_router(server: Server) -> None:
    """No stream runs on the worker, so a router may hear of it from Serve before its own stream to the worker breaks."""
    workers = wait_for_workers(server, 2)
    before = look_until(lambda: worker_changes(server), lambda changes: len({router for router, _ in changes}) == 2)
    victim, _ = wait_for_replicas(server, ":Worker", 2)
    os.kill(victim, signal.SIGKILL)
    wait_for_replicas(server, ":Worker", 2, without=victim)
    wait_for_workers(server, 2, other_than=workers)
    expected = {key: count + (key[1] != "drained") for key, count in before.items()}
    look_until(lambda: worker_changes(server), lambda changes: changes == expected)


def test_any_routers_page_has_all_routers_workers_and_ranks(server: Server) -> None:
    wait_for_workers(server, 2)
    check_pages(server, 4)


def test_routers_agree_where_a_prefix_is(server: Server) -> None:
    check_prefixes(server)


def test_a_redeploy_of_workers_and_routers_costs_nobody_an_answer(
    server: Server, undisturbed: list[Stream], tiny_model: Path
) -> None:
    """All workers and routers are replaced while 32 clients go on asking; the new workers have one rank each."""
    before = replicas(server)
    settings = {"model": str(tiny_model), **SETTINGS, "tensor_parallel_size": 1}
    answers = redeploy_under_load(server, settings, REQUESTS, pause_s=PAUSE_S)
    for rounds, expected in zip(answers, undisturbed, strict=True):
        check_answers(rounds, [expected] * len(rounds), MAX_TOKENS)
    wait_for_workers(server, 2)
    look_until(lambda: replicas(server), lambda pids: not before & pids)  # old ones end once they are drained
