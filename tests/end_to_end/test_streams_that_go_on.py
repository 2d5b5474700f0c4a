"""Streams outlive what computes them: killed ranks and workers, redeploys; two routers that know the same.

One server: two workers of two ranks, two routers. Every disturbance strikes while 32 streams run, and every client gets, on the
same connection, the text of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server import (
    Server,
    assert_ended_cleanly,
    ray_address,
    replica_pids,
    start_server,
    stop_server,
    wait_a_moment,
)
from streams import Stream, ask_all, ask_until, bodies

pytestmark = pytest.mark.serve

REQUESTS = bodies(32, max_tokens=100)
SETTINGS = {"kv_cache_memory_bytes": "16MiB", "replicas": 2, "tensor_parallel_size": 2, "router_replicas": 2}


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
    check_answers(streams, streams)
    return streams


def check_answers(streams: list[Stream], undisturbed: list[Stream]) -> None:
    """Every answer is whole, with each token once."""
    assert [stream.error for stream in streams] == [None] * len(streams)
    assert all(stream.is_whole for stream in streams)
    assert [stream.text for stream in streams] == [stream.text for stream in undisturbed]
    assert {stream.usage["completion_tokens"] for stream in streams if stream.usage} == {100}


def wait_for_workers(server: Server, count: int) -> None:
    """Wait until every router (asked over a new connection each time) has a stream to so many workers."""
    seen, give_up_s = 0, time.monotonic() + 90
    while seen < 6 and time.monotonic() < give_up_s:
        workers = httpx.get(server.url, timeout=30).json()["workers"]
        seen = seen + 1 if [worker["state"] for worker in workers] == ["open"] * count else 0
        wait_a_moment(server)
    assert seen == 6


def wait_for_replacement(server: Server, kind: str, victim: int, count: int) -> None:
    """Wait until there are `count` processes of a kind without the killed one, and a stream to both workers again.

    A kill whose answers had all been computed is noticed after them, and until then the routers see two open workers.
    """
    give_up_s = time.monotonic() + 90
    while len(pids := replica_pids(server, kind)) != count or victim in pids:
        assert time.monotonic() < give_up_s, pids
        wait_a_moment(server)
    wait_for_workers(server, 2)


def test_a_killed_rank_costs_nobody_an_answer(server: Server, undisturbed: list[Stream]) -> None:
    (victim, *_) = replica_pids(server, "RankActor")
    streams = asyncio.run(ask_all(server.url, REQUESTS, lambda: os.kill(victim, signal.SIGKILL)))
    check_answers(streams, undisturbed)
    wait_for_replacement(server, "RankActor", victim, 4)


def test_a_killed_worker_costs_nobody_an_answer(server: Server, undisturbed: list[Stream]) -> None:
    (victim, _) = replica_pids(server, ":Worker")
    streams = asyncio.run(ask_all(server.url, REQUESTS, lambda: os.kill(victim, signal.SIGKILL)))
    check_answers(streams, undisturbed)
    wait_for_replacement(server, ":Worker", victim, 2)


def test_a_crash_is_the_same_to_every_router(server: Server) -> None:
    """No stream runs on the worker, so a router may hear of it from Serve before its own stream to the worker breaks."""
    wait_for_workers(server, 2)
    before = worker_changes(server)
    (victim, _) = replica_pids(server, ":Worker")
    os.kill(victim, signal.SIGKILL)
    wait_for_replacement(server, ":Worker", victim, 2)
    expected = {key: count + (key[1] != "drained") for key, count in before.items()}
    give_up_s = time.monotonic() + 60
    while (after := worker_changes(server)) != expected and time.monotonic() < give_up_s:
        wait_a_moment(server)
    assert after == expected
    assert len({router for router, _ in after}) == 2


def worker_changes(server: Server) -> dict[tuple[str, str], float]:
    """How many workers joined, were lost or drained, by router."""
    page = httpx.get(f"{server.url}/metrics", timeout=30).text
    family = next(one for one in text_string_to_metric_families(page) if one.name == "transom_router_worker_changes")
    return {(sample.labels["router"], sample.labels["change"]): sample.value for sample in family.samples}


def test_any_routers_page_has_all_routers_workers_and_ranks(server: Server) -> None:
    """New connections come to either router; each process that discovery names has a page of its own behind the same address."""
    wait_for_workers(server, 2)
    for _ in range(4):
        assert labels_on(server, "/metrics", "transom_router_process_cpu_seconds", "router") == 2
        assert labels_on(server, "/metrics", "transom_rank_info", "worker", "rank") == 4
    targets = httpx.get(f"{server.url}/metrics/sd").json()
    assert sorted(one["labels"]["__meta_transom_kind"] for one in targets) == ["router", "router", "worker", "worker"]
    for one in targets:
        assert one["targets"] == [server.url.removeprefix("http://")]
        path = f"/metrics/process?name={one['labels']['__param_name']}"
        assert labels_on(server, path, "transom_build_info", one["labels"]["__meta_transom_kind"]) == 1


def labels_on(server: Server, path: str, family: str, *labels: str) -> int:
    """The number of different values that a family's labels have together on a page of metrics."""
    page = httpx.get(f"{server.url}{path}", timeout=30).text
    found = [
        sample.labels for one in text_string_to_metric_families(page) if one.name == family for sample in one.samples
    ]
    return len({tuple(sample[label] for label in labels) for sample in found})


def test_routers_agree_where_a_prefix_is(server: Server) -> None:
    """Requests of new connections come to either router; both find the worker that has the prefix."""
    body = {"prompt": "Once upon a time there was a very long prompt. " * 20, "max_tokens": 1}
    cached = []
    for _ in range(8):
        usage = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0
    assert cached[1:] == [(usage["prompt_tokens"] - 1) // 16 * 16] * 7


def test_a_redeploy_of_workers_and_routers_costs_nobody_an_answer(
    server: Server, undisturbed: list[Stream], tiny_model: Path
) -> None:
    """All workers and routers are replaced while 32 clients go on asking; the new workers have one rank each."""
    before = {*replica_pids(server, ":Worker"), *replica_pids(server, ":Router")}
    settings = {"model": str(tiny_model), **SETTINGS, "tensor_parallel_size": 1}
    script = [sys.executable, str(Path(__file__).with_name("redeploy.py")), ray_address(server), json.dumps(settings)]
    deploying = subprocess.Popen(script, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        answers = asyncio.run(ask_until(server.url, REQUESTS, lambda: deploying.poll() is not None))
        assert deploying.wait(60) == 0
    finally:
        deploying.kill()
    for rounds, expected in zip(answers, undisturbed, strict=True):
        check_answers(rounds, [expected] * len(rounds))
    wait_for_workers(server, 2)
    after = {*replica_pids(server, ":Worker"), *replica_pids(server, ":Router")}
    assert not before & after or wait_until_gone(server, before)


def wait_until_gone(server: Server, pids: set[int]) -> bool:
    """Old replicas end once they are drained."""
    give_up_s = time.monotonic() + 60
    while time.monotonic() < give_up_s:
        if not pids & {*replica_pids(server, ":Worker"), *replica_pids(server, ":Router")}:
            return True
        wait_a_moment(server)
    return False
