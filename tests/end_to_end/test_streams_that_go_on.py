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
from collections.abc import Iterator, Set
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from server import (
    HTTP,
    Server,
    assert_ended_cleanly,
    look_until,
    ray_address,
    replica_pids,
    start_server,
    stop_server,
    wait_for_replicas,
)
from streams import Stream, ask_all, ask_until, bodies

pytestmark = [pytest.mark.serve, pytest.mark.timeout(1200)]

Page = dict[str, list[Sample]]
REQUESTS = bodies(32, max_tokens=100)
PAUSE_S = 3.0  # of a client between two answers, while new processes start on the cores that answer
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


def page_of(server: Server, path: str = "/metrics") -> Page:
    """A page of metrics, by family; the usual one has all routers', workers' and ranks'."""
    text = HTTP.get(f"{server.url}{path}").text
    return {family.name: family.samples for family in text_string_to_metric_families(text)}


def workers_of_routers(server: Server) -> list[tuple[dict[str, float], set[str]]]:
    """What each of the routers knows: how many workers in which state, and which workers' prefixes."""
    page = page_of(server)
    routers: dict[str, tuple[dict[str, float], set[str]]] = {}
    for sample in page.get("transom_router_workers", []):
        states, _ = routers.setdefault(sample.labels["router"], ({}, set()))
        if sample.value:
            states[sample.labels["state"]] = sample.value
    for sample in page.get("transom_router_mirror_version", []):
        if sample.labels["router"] in routers:
            routers[sample.labels["router"]][1].add(sample.labels["worker"])
    return list(routers.values())


def wait_for_workers(server: Server, count: int, *, other_than: Set[str] = frozenset()) -> set[str]:
    """Wait until both routers have streams to the same `count` workers, and not to just those of before; who they are."""

    def agree(routers: list[tuple[dict[str, float], set[str]]]) -> bool:
        first, *others = routers or [({}, set())]
        states, names = first
        return others == [first] and states == {"open": count} and len(names) == count and names != other_than

    return look_until(lambda: workers_of_routers(server), agree)[0][1]


def wait_for_ranks(server: Server, *, without: int) -> None:
    """Wait until both workers compute with ranks of which none is the killed one.

    A kill whose answers had all been computed is noticed after them, and routers know nothing of it: a worker starts its ranks
    again by itself.
    """

    def pids() -> tuple[set[int], set[int]]:
        told = {int(sample.labels["pid"]) for sample in page_of(server).get("transom_rank_info", [])}
        return told, set(replica_pids(server, "RankActor"))

    look_until(pids, lambda seen: seen[0] == seen[1] and len(seen[0]) == 4 and without not in seen[0])


def test_a_killed_rank_costs_nobody_an_answer(server: Server, undisturbed: list[Stream]) -> None:
    victim, *_ = wait_for_replicas(server, "RankActor", 4)
    streams = asyncio.run(ask_all(server.url, REQUESTS, lambda: os.kill(victim, signal.SIGKILL)))
    check_answers(streams, undisturbed)
    wait_for_ranks(server, without=victim)
    wait_for_workers(server, 2)


def test_a_killed_worker_costs_nobody_an_answer(server: Server, undisturbed: list[Stream]) -> None:
    workers = wait_for_workers(server, 2)
    victim, _ = wait_for_replicas(server, ":Worker", 2)
    streams = asyncio.run(ask_all(server.url, REQUESTS, lambda: os.kill(victim, signal.SIGKILL)))
    check_answers(streams, undisturbed)
    wait_for_replicas(server, ":Worker", 2, without=victim)
    wait_for_workers(server, 2, other_than=workers)


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


def worker_changes(server: Server) -> dict[tuple[str, str], float]:
    """How many workers joined, were lost or drained, by router."""
    samples = page_of(server).get("transom_router_worker_changes", [])
    return {(sample.labels["router"], sample.labels["change"]): sample.value for sample in samples}


def test_any_routers_page_has_all_routers_workers_and_ranks(server: Server) -> None:
    """New connections come to either router; each process that discovery names has a page of its own behind the same address."""
    wait_for_workers(server, 2)
    # twenty in a row, so that both routers have answered; a process that is slow may be missing at first
    look_until(lambda: [page_of(server) for _ in range(20)], lambda pages: all(map(has_all_processes, pages)))
    kinds = ["router", "router", "worker", "worker"]
    targets = look_until(
        lambda: HTTP.get(f"{server.url}/metrics/sd").json(),
        lambda found: sorted(one["labels"]["__meta_transom_kind"] for one in found) == kinds,
    )
    for one in targets:
        assert one["targets"] == [server.url.removeprefix("http://")]
        path = f"/metrics/process?name={one['labels']['__param_name']}"
        wait_for_page_of_its_own(server, path, one["labels"]["__meta_transom_kind"])


def wait_for_page_of_its_own(server: Server, path: str, kind: str) -> None:
    """A page of one process only; there is none while that is slow."""
    look_until(lambda: page_of(server, path), lambda page: num_labels(page, "transom_build_info", kind) == 1)


def has_all_processes(page: Page) -> bool:
    """Two routers and four ranks."""
    num_routers = num_labels(page, "transom_router_process_cpu_seconds", "router")
    return (num_routers, num_labels(page, "transom_rank_info", "worker", "rank")) == (2, 4)


def num_labels(page: Page, family: str, *labels: str) -> int:
    """The number of different values that a family's labels have together on a page of metrics."""
    return len({tuple(sample.labels[label] for label in labels) for sample in page.get(family, [])})


def test_routers_agree_where_a_prefix_is(server: Server) -> None:
    """Requests of new connections come to either router; both find the worker that has the prefix."""
    body = {"prompt": "Once upon a time there was a very long prompt. " * 20, "max_tokens": 1}
    before = look_until(lambda: mirror_versions(server), mirrors_agree)
    cached = []
    for _ in range(8):
        usage = HTTP.post(f"{server.url}/v1/completions", json=body).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        # the answer went through one router, and may be here before the other knows what it left in the cache
        look_until(lambda: mirror_versions(server), lambda versions: versions != before and mirrors_agree(versions))
    assert cached[0] == 0
    assert cached[1:] == [(usage["prompt_tokens"] - 1) // 16 * 16] * 7


def mirror_versions(server: Server) -> dict[tuple[str, str], float]:
    """How far each router knows the prefixes of each worker."""
    samples = page_of(server).get("transom_router_mirror_version", [])
    return {(sample.labels["router"], sample.labels["worker"]): sample.value for sample in samples}


def mirrors_agree(versions: dict[tuple[str, str], float]) -> bool:
    """Whether both routers know each of the two workers equally well."""
    return len(versions) == 4 and len({(worker, version) for (_, worker), version in versions.items()}) == 2


def test_a_redeploy_of_workers_and_routers_costs_nobody_an_answer(
    server: Server, undisturbed: list[Stream], tiny_model: Path
) -> None:
    """All workers and routers are replaced while 32 clients go on asking; the new workers have one rank each."""
    before = replicas(server)
    settings = {"model": str(tiny_model), **SETTINGS, "tensor_parallel_size": 1}
    script = [sys.executable, str(Path(__file__).with_name("redeploy.py")), ray_address(server), json.dumps(settings)]
    deploying = subprocess.Popen(script, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        answers = asyncio.run(ask_until(server.url, REQUESTS, lambda: deploying.poll() is not None, pause_s=PAUSE_S))
        assert deploying.wait() == 0
    finally:
        deploying.kill()
    for rounds, expected in zip(answers, undisturbed, strict=True):
        check_answers(rounds, [expected] * len(rounds))
    wait_for_workers(server, 2)
    look_until(lambda: replicas(server), lambda pids: not before & pids)  # old ones end once they are drained


def replicas(server: Server) -> set[int]:
    """All workers' and routers' processes."""
    return {*replica_pids(server, ":Worker"), *replica_pids(server, ":Router")}
