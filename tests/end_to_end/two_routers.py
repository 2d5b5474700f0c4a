"""Looks at a server of two routers from outside: its workers, ranks and pages; and deploys it again under load."""

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

from benchmarks.server_process import Server
from benchmarks.serving.process_names import ray_address
from benchmarks.serving.soak.cluster import Page
from tests.end_to_end.server import HTTP, look_until, page_of, replica_pids
from tests.end_to_end.streams import Stream, ask_until


def check_answers(streams: list[Stream], undisturbed: list[Stream], max_tokens: int) -> None:
    """Every answer is whole, with each token once."""
    assert [stream.error for stream in streams] == [None] * len(streams)
    assert all(stream.is_whole for stream in streams)
    assert [stream.text for stream in streams] == [stream.text for stream in undisturbed]
    assert all(stream.usage and stream.usage["completion_tokens"] == max_tokens for stream in streams)


def workers_of_routers(server: Server) -> list[tuple[dict[str, float], set[str]]]:
    """What each of the routers knows: how many workers in which state, and which workers' prefixes."""
    page, found = page_of(server), []
    for router in page.labels("transom_router_workers", "router"):
        states = page.labels("transom_router_workers", "state", router=router)
        counts = {state: page.sum("transom_router_workers", router=router, state=state) for state in states}
        workers = page.labels("transom_router_mirror_version", "worker", router=router)
        found.append(({state: count for state, count in counts.items() if count}, workers))
    return found


def wait_for_workers(server: Server, count: int, *, other_than: Set[str] = frozenset()) -> set[str]:
    """Wait until both routers have streams to the same `count` workers, and not to just those of before; who they are."""

    def agree(routers: list[tuple[dict[str, float], set[str]]]) -> bool:
        first, *others = routers or [({}, set())]
        states, names = first
        return others == [first] and states == {"open": count} and len(names) == count and names != other_than

    return look_until(lambda: workers_of_routers(server), agree)[0][1]


def wait_for_ranks(server: Server, count: int, *, without: int) -> None:
    """Wait until all workers compute with `count` ranks of which none is the killed one.

    A kill whose answers had all been computed is noticed after them, and routers know nothing of it: a worker starts its ranks
    again by itself.
    """

    def pids() -> tuple[set[int], set[int]]:
        return set(map(int, page_of(server).labels("transom_rank_info", "pid"))), set(replica_pids(server, "rank"))

    look_until(pids, lambda seen: seen[0] == seen[1] and len(seen[0]) == count and without not in seen[0])


def worker_changes(server: Server) -> dict[tuple[str, str], float]:
    """How many workers joined, were lost or drained, by router."""
    samples = page_of(server).samples.get("transom_router_worker_changes_total", [])
    return {(sample.labels["router"], sample.labels["change"]): sample.value for sample in samples}


def check_pages(server: Server, num_ranks: int) -> None:
    """New connections come to either router; each process that discovery names has a page of its own at the same address."""
    # twenty in a row, so that both routers have answered; a process that is slow may be missing at first
    look_until(
        lambda: [page_of(server) for _ in range(20)],
        lambda pages: all(has_all_processes(page, num_ranks) for page in pages),
    )
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
    look_until(lambda: page_of(server, path), lambda page: len(page.labels("transom_build_info", kind)) == 1)


def has_all_processes(page: Page, num_ranks: int) -> bool:
    """Two routers and `num_ranks` ranks; a worker without ranks of its own counts as one."""
    routers = page.labels("transom_router_process_cpu_seconds_total", "router")
    return (len(routers), len(page.labels("transom_rank_info", "pid"))) == (2, num_ranks)


def check_prefixes(server: Server) -> None:
    """Requests of new connections come to either router; both find the worker that has the prefix."""
    body = {"prompt": "Once upon a time there was a very long prompt. " * 20, "max_tokens": 1}
    before = look_until(lambda: mirror_versions(server), mirrors_agree)
    cached = []
    for _ in range(8):
        usage = HTTP.post(f"{server.url}/v1/completions", json=body).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        # the answer went through one router, and may be here before the other knows what it left in the cache
        look_until(lambda: mirror_versions(server), lambda versions: versions != before and mirrors_agree(versions))
    assert cached == [0] + [(usage["prompt_tokens"] - 1) // 16 * 16] * 7


def mirror_versions(server: Server) -> dict[tuple[str, str], float]:
    """How far each router knows the prefixes of each worker."""
    samples = page_of(server).samples.get("transom_router_mirror_version", [])
    return {(sample.labels["router"], sample.labels["worker"]): sample.value for sample in samples}


def mirrors_agree(versions: dict[tuple[str, str], float]) -> bool:
    """Whether both routers know each of the two workers equally well."""
    return len(versions) == 4 and len({(worker, version) for (_, worker), version in versions.items()}) == 2


def redeploy_under_load(
    server: Server, settings: dict[str, Any], requests: list[dict[str, Any]], *, pause_s: float
) -> list[list[Stream]]:
    """Replace all workers and routers while clients ask again and again; the answers of each client."""
    script = [sys.executable, str(Path(__file__).with_name("redeploy.py")), ray_address(server), json.dumps(settings)]
    deploying = subprocess.Popen(script, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        again = [itertools.repeat(body) for body in requests]
        answers = asyncio.run(ask_until(server.url, again, lambda: deploying.poll() is not None, pause_s=pause_s))
        assert deploying.wait() == 0
    finally:
        deploying.kill()
        deploying.wait()
    return answers


def replicas(server: Server) -> set[int]:
    """All workers' and routers' processes."""
    return {*replica_pids(server, "worker"), *replica_pids(server, "router")}
