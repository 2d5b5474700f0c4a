"""From three bare hosts to answers, the loss of a host, recovery and nothing: with the shipped files and the real `ray up`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest

from tests.deploy.wheel import build_wheel
from tests.on_hosts.hosts import ADMIN, Host, Hosts, missing
from tests.on_hosts.on_premise import ADMIN_KEY, API_KEY, OnPremise
from tests.tiny_checkpoints import tiny_llama

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

CLUSTER = HEAD, ONE, TWO = "head", "one", "two"
HERE = Path(__file__).parent
NIXL = find_spec("nixl")
NUM_STREAMS, MAX_TOKENS = 8, 400
RESUMED = re.compile(r'^transom_router_failovers_total\{[^}]*outcome="resumed"[^}]*\} (\S+)$', re.MULTILINE)
CHANGE_TIMEOUT_S, ANSWER_TIMEOUT_S = 300.0, 120.0  # for machines that are busy
# The first worker fits on host `one`, the second has room for one of its ranks there and for the other on host `two`.
SLOTS = {ONE: '--num-cpus=3 --resources={"slot":3}', TWO: '--num-cpus=1 --resources={"slot":1}'}
SETTINGS = dict(replicas=2, tensor_parallel_size=2, dtype="float32", num_threads=1, kv_cache_memory_bytes="64MiB")
BOTH = {"Router": 1, "Worker": 2}
RANK = {"CPU": 0.25, "slot": 1}
WORKER = {
    "name": "Worker",
    "placement_group_bundles": [{"CPU": 0.05}, RANK, RANK],
    "ray_actor_options": {"num_cpus": 0.05},
}


@pytest.fixture
def machine_as_before() -> Iterator[None]:
    """This machine's interfaces, mounts and named namespaces are what they were."""
    before = _traces()
    yield
    assert _traces() == before


@pytest.fixture
def hosts(machine_as_before: None, tmp_path: Path) -> Iterator[Hosts]:
    """An administrator's host and three that become the cluster; they end with the test in any case."""
    if problem := missing():
        pytest.fail(problem)
    booted = Hosts(tmp_path, [ADMIN, *CLUSTER])
    try:
        for name in (ADMIN, *CLUSTER):
            booted.boot(name)
        yield booted
    finally:
        booted.close()
        shutil.rmtree(tmp_path)
    assert not booted.processes(), "processes of the hosts live on"


def begun(hosts: Hosts, folder: Path, workers: dict[str, str], *exports: str) -> tuple[OnPremise, View]:
    """A cluster of three hosts without an app. `workers` and `exports` are those of `OnPremise`."""
    cluster = OnPremise(hosts, workers)
    cluster.write_files(build_wheel(folder), tiny_llama(folder / "model", max_position=4096))
    for name in CLUSTER:
        cluster.prepare(name, *exports)
    cluster.up()
    view = View(hosts[HEAD])
    view.wait_for("three hosts", hosts=[hosts.address(name) for name in CLUSTER])
    return cluster, view


def test_a_cluster_from_nothing_to_nothing(hosts: Hosts, tmp_path: Path) -> None:
    cluster, view = begun(hosts, tmp_path, SLOTS)
    head, one, two = (hosts.address(name) for name in CLUSTER)
    cluster.deploy(SETTINGS, [WORKER])
    view.wait_for("both workers", app="RUNNING", replicas=BOTH, spans=[[one], [one, two]])
    expected = Streams(hosts[ADMIN]).answers()
    assert all(answer["whole"] and answer["end"] == "length" for answer in expected), expected

    streams = Streams(hosts[ADMIN])
    streams.wait_until_begun()
    hosts[TWO].power_off()
    view.wait_for("the loss to be noticed", hosts=[head, one])
    assert streams.answers() == expected
    assert num_resumed(hosts[ADMIN]) >= 1
    assert Streams(hosts[ADMIN]).answers() == expected

    hosts.boot(TWO)
    view.wait_for("the host to be back", hosts=[head, one, two])
    view.wait_for("both workers again", app="RUNNING", replicas=BOTH, spans=[[one], [one, two]])
    assert Streams(hosts[ADMIN]).answers() == expected

    view.close()
    cluster.down()
    for name in CLUSTER:
        assert "ray" not in hosts[name].run("ps -eo args=", timeout_s=10).lower(), f"Ray lives on on {name}"


@pytest.mark.skipif(NIXL is None, reason="NIXL is not installed")
def test_a_prefix_moves_between_hosts_by_nixl_over_tcp(hosts: Hosts, tmp_path: Path) -> None:
    """A worker on each of two hosts. The target's rank compares all blocks that came with the source's digests of them."""
    assert NIXL is not None
    one_each = dict.fromkeys((ONE, TWO), '--num-cpus=1 --resources={"slot":1}')
    cluster, view = begun(hosts, tmp_path, one_each, f"PYTHONPATH={Path(NIXL.origin or '').parents[1]}")
    worker = {"name": "Worker", "ray_actor_options": {"num_cpus": 0.5, "resources": {"slot": 1}}}
    wire = {"wire": "nixl", "transports": "tcp", "devices": "eth0", "ports": "30000-30999", "verify": "all"}
    memory = {"kv_cache_memory_bytes": "64MiB", "swap_space": "64MiB"}
    more = memory | {f"kv_transfer_{name}": value for name, value in wire.items()}
    more["admin_api_key_file"] = "/root/transom/admin_keys"  # measuring takes time from all clients
    cluster.deploy({**SETTINGS, "tensor_parallel_size": 1, **more}, [worker])
    view.wait_for("both workers", app="RUNNING", replicas=BOTH)
    Streams(hosts[ADMIN]).answers()
    measure = f"transom bench transfer http://{HEAD}:8000 --megabytes 0.1 --rounds 1 --api-key {ADMIN_KEY} --json"
    lines = hosts[HEAD].run(f". ~/transom/env.sh; {measure}", timeout_s=ANSWER_TIMEOUT_S).splitlines()
    pairs = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(pairs) == 2, lines
    assert all(pair["bytes"] >= 1e5 and 0 < pair["read"] < pair["nixl"] for pair in pairs), pairs
    view.close()


def num_resumed(client: Host) -> float:
    """How many requests have gone on at another worker, by the router's metrics."""
    get = f"httpx.get('http://{HEAD}:8000/metrics', headers={{'authorization': 'Bearer {API_KEY}'}})"
    page = client.run(f'python -c "import httpx; print({get}.text)"', timeout_s=30)
    counts = RESUMED.findall(page)
    assert len(counts) == 1, page
    return float(counts[0])


class View:
    """What the head sees of the cluster, while it changes."""

    def __init__(self, head: Host) -> None:
        (head.files / "root/look.py").write_bytes((HERE / "look.py").read_bytes())
        self._process = head.start(". ~/transom/env.sh; exec python look.py 2>/dev/null")
        self._lines = _lines(self._process)
        self._now: dict[str, Any] = {}

    def wait_for(self, what: str, **wanted: Any) -> None:
        """Until the head sees what is wanted."""
        give_up_s = time.monotonic() + CHANGE_TIMEOUT_S
        while any(self._now.get(name) != value for name, value in wanted.items()):
            try:
                line = self._lines.get(timeout=max(0.0, give_up_s - time.monotonic()))
            except Empty:
                pytest.fail(
                    f"Waited {CHANGE_TIMEOUT_S:.0f} s for {what}; the cluster is {json.dumps(self._now, indent=1)}"
                )
            if line.startswith("{"):  # not one of Ray's own messages
                self._now = json.loads(line)

    def close(self) -> None:
        """Look no more."""
        self._process.kill()
        self._process.wait()


class Streams:
    """Streams that a client outside the cluster reads."""

    def __init__(self, client: Host) -> None:
        (client.files / "root/ask.py").write_bytes((HERE / "ask.py").read_bytes())
        self._process = client.start(f"exec python ask.py http://{HEAD}:8000 {API_KEY} {NUM_STREAMS} {MAX_TOKENS} 2>&1")
        self._lines = _lines(self._process)

    def wait_until_begun(self) -> None:
        """All streams have begun and go on."""
        self._line("begun")

    def answers(self) -> list[dict[str, Any]]:
        """What the client has of each in the end."""
        answers: list[dict[str, Any]] = json.loads(self._line("[{"))
        return answers

    def _line(self, beginning: str) -> str:
        said = []
        while not said or not said[-1].startswith(beginning):
            try:
                said.append(self._lines.get(timeout=ANSWER_TIMEOUT_S))
            except Empty:
                pytest.fail(f"The client was to say {beginning!r} and has said:\n{''.join(said)}")
        return said[-1]


def _lines(process: subprocess.Popen[str]) -> Queue[str]:
    """What it prints, read meanwhile."""
    lines: Queue[str] = Queue()
    assert process.stdout is not None

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)

    threading.Thread(target=read, daemon=True).start()
    return lines


def _traces() -> tuple[list[str], str, list[str]]:
    named = Path("/run/netns")
    return (
        sorted(os.listdir("/sys/class/net")),
        Path("/proc/mounts").read_text(),
        sorted(os.listdir(named)) if named.exists() else [],
    )
