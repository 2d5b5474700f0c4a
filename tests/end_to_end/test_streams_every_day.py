"""One server's life: a worker is killed, all is deployed again, a rank is killed, and the server ends; no answer suffers.

The server begins with two routers and two workers of windows over full layers. The redeploy leaves one worker of two ranks. Every
disturbance strikes while streams run, and each client gets, on the same connection, the text of an undisturbed run. The tests
follow one another on the one server. test_streams_that_go_on.py has more ranks, streams and disturbances.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.end_to_end.server import (
    PATIENCE_S,
    Server,
    assert_ended_cleanly,
    look_until,
    start_server,
    stop_server,
    wait_for_replicas,
)
from tests.end_to_end.streams import Stream, ask_all, bodies
from tests.end_to_end.two_routers import (
    check_answers,
    check_pages,
    check_prefixes,
    redeploy_under_load,
    replicas,
    wait_for_ranks,
    wait_for_workers,
    worker_changes,
)

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1200)]

MAX_TOKENS = 60
REQUESTS = bodies(8, max_tokens=MAX_TOKENS)
PAUSE_S = 1.0  # of a client between two answers, while new processes start on the cores that answer
SETTINGS = {
    "kv_cache_memory_bytes": "16MiB",
    "replicas": 2,
    "router_replicas": 2,
    "window": 64,
    "sinks": 4,
    "window_pattern": "SSF",
    "worker_wait_s": PATIENCE_S,  # streams wait for the ranks of the only worker
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    flags = [text for name, value in SETTINGS.items() for text in ("--" + name.replace("_", "-"), str(value))]
    server = start_server(str(tiny_model), tmp_path_factory.mktemp("streams") / "log", *flags)
    yield server
    assert_ended_cleanly(server, stop_server(server, signal.SIGTERM))


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[Stream]:
    wait_for_workers(server, 2)
    streams = asyncio.run(ask_all(server.url, REQUESTS))
    assert len({stream.text for stream in streams}) == len(streams)
    check_answers(streams, streams, MAX_TOKENS)
    return streams


def test_any_routers_page_has_all_routers_and_workers(server: Server, undisturbed: list[Stream]) -> None:
    check_pages(server, num_ranks=2)


def test_routers_agree_where_a_prefix_is(server: Server) -> None:
    check_prefixes(server)


def test_streams_outlive_a_killed_worker(server: Server, undisturbed: list[Stream]) -> None:
    workers = wait_for_workers(server, 2)
    before = worker_changes(server)
    victim, _ = wait_for_replicas(server, ":Worker", 2)
    streams = asyncio.run(ask_all(server.url, REQUESTS, partial(os.kill, victim, signal.SIGKILL)))
    check_answers(streams, undisturbed, MAX_TOKENS)
    wait_for_replicas(server, ":Worker", 2, without=victim)
    wait_for_workers(server, 2, other_than=workers)
    expected = {key: count + (key[1] != "drained") for key, count in before.items()}
    look_until(lambda: worker_changes(server), lambda changes: changes == expected)  # the same to both routers


def test_streams_outlive_a_redeploy_of_workers_and_routers(
    server: Server, undisturbed: list[Stream], tiny_model: Path
) -> None:
    before = replicas(server)
    settings = {"model": str(tiny_model), **SETTINGS, "replicas": 1, "tensor_parallel_size": 2}
    answers = redeploy_under_load(server, settings, REQUESTS, pause_s=PAUSE_S)
    for rounds, expected in zip(answers, undisturbed, strict=True):
        check_answers(rounds, [expected] * len(rounds), MAX_TOKENS)
    wait_for_workers(server, 1)
    look_until(lambda: replicas(server), lambda pids: not before & pids)  # old ones end once they are drained


def test_streams_outlive_a_killed_rank_of_the_only_worker(server: Server, undisturbed: list[Stream]) -> None:
    """They stand still until the worker has started its ranks again."""
    victim, _ = wait_for_replicas(server, "RankActor", 2)
    streams = asyncio.run(ask_all(server.url, REQUESTS, partial(os.kill, victim, signal.SIGKILL)))
    check_answers(streams, undisturbed, MAX_TOKENS)
    wait_for_ranks(server, 2, without=victim)


def test_the_end_lets_streams_end(server: Server, undisturbed: list[Stream]) -> None:
    streams = asyncio.run(ask_all(server.url, REQUESTS, partial(server.process.send_signal, signal.SIGTERM)))
    check_answers(streams, undisturbed, MAX_TOKENS)
