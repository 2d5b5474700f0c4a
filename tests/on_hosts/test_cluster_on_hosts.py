"""From three bare hosts to answers, the loss of a host, recovery and nothing: with the shipped files and the real `ray up`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest
from hosts import ADMIN, Host, Hosts, missing
from on_premise import API_KEY, OnPremise, build_wheel

from tiny_checkpoints import tiny_llama

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]

HEAD, ONE, TWO = "head", "one", "two"
HERE = Path(__file__).parent
NUM_STREAMS, MAX_TOKENS = 8, 400
# The first worker fits on host `one`, the second has room for one of its ranks there and for the other on host `two`.
SLOTS = {ONE: '--num-cpus=3 --resources={"slot":3}', TWO: '--num-cpus=1 --resources={"slot":1}'}
SETTINGS = {
    "replicas": 2,
    "tensor_parallel_size": 2,
    "dtype": "float32",
    "num_threads": 1,
    "kv_cache_memory_bytes": "64MiB",
}
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
    """An administrator's host and three that become the cluster; they end with the test, whatever happens."""
    if problem := missing():
        pytest.fail(problem)
    booted = Hosts(tmp_path, [ADMIN, HEAD, ONE, TWO])
    try:
        for name in (ADMIN, HEAD, ONE, TWO):
            booted.boot(name)
        yield booted
    finally:
        booted.close()
        shutil.rmtree(tmp_path)
    assert not booted.processes(), "processes of the hosts live on"


def test_a_cluster_from_nothing_to_nothing(hosts: Hosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story = Story(capsys)
    cluster = OnPremise(hosts, SLOTS)
    cluster.write_files(build_wheel(tmp_path), tiny_llama(tmp_path / "model", max_position=4096))
    for name in (HEAD, ONE, TWO):
        cluster.prepare(name)
    story.tell("hosts, a wheel and a model are there")

    cluster.up()
    view = View(hosts[HEAD])
    addresses = {name: hosts.address(name) for name in (HEAD, ONE, TWO)}
    view.wait(lambda now: len(now["hosts"]) == 3, "three hosts in the cluster", 60)
    story.tell("ray up: three hosts are one cluster")

    cluster.deploy(SETTINGS, [WORKER])
    now = view.wait(
        lambda now: now["app"] == "RUNNING" and now["replicas"] == {"Router": 1, "Worker": 2}, "both workers", 90
    )
    assert now["spans"] == [[addresses[ONE]], [addresses[ONE], addresses[TWO]]]
    story.tell("serve deploy: one worker on one host, one across two")

    expected = Streams(hosts[ADMIN]).answers()
    assert all(answer["whole"] and answer["end"] == "length" for answer in expected), expected
    story.tell(f"{NUM_STREAMS} streams from outside are answered")

    streams = Streams(hosts[ADMIN])
    streams.wait_until_begun()
    hosts[TWO].power_off()
    lost = time.monotonic()
    view.wait(lambda now: now["hosts"] == sorted([addresses[HEAD], addresses[ONE]]), "the loss to be noticed", 30)
    story.tell(f"a host is lost, and noticed after {time.monotonic() - lost:.1f} s")
    assert streams.answers() == expected
    story.tell(
        f"{NUM_STREAMS} streams that ran are answered as if nothing had been, after {time.monotonic() - lost:.1f} s"
    )
    assert Streams(hosts[ADMIN]).answers() == expected
    story.tell("new streams are answered")

    hosts.boot(TWO)
    view.wait(lambda now: len(now["hosts"]) == 3, "the host to be in the cluster again", 90)
    story.tell("the host is back")
    view.wait(
        lambda now: now["replicas"] == {"Router": 1, "Worker": 2} and len(now["spans"]) == 2, "both workers again", 90
    )
    assert Streams(hosts[ADMIN]).answers() == expected
    story.tell("both workers serve again")

    view.close()
    cluster.down()
    for name in (HEAD, ONE, TWO):
        assert "ray" not in hosts[name].run("ps -eo args=", timeout_s=10).lower(), f"Ray lives on on {name}"
    story.tell("ray down: no process of Ray on any host")


class Story:
    """Says when what has happened."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self._begin_s = capsys, time.monotonic()

    def tell(self, what: str) -> None:
        """A line with the seconds since the beginning."""
        with self._capsys.disabled():
            print(f"\n  {time.monotonic() - self._begin_s:5.1f} s  {what}", end="", flush=True)


class View:
    """What the head sees of the cluster, while it changes."""

    def __init__(self, head: Host) -> None:
        (head.files / "root/look.py").write_bytes((HERE / "look.py").read_bytes())
        self._process = head.start(". ~/transom/env.sh; exec python look.py 2>/dev/null")
        self._seen: Queue[str] = Queue()
        threading.Thread(target=_read_into, args=(self._process, self._seen), daemon=True).start()
        self._now: dict[str, Any] = {"hosts": []}

    def wait(self, is_it: Callable[[dict[str, Any]], bool], what: str, timeout_s: float) -> dict[str, Any]:
        """The first view of which `is_it` holds."""
        give_up_s = time.monotonic() + timeout_s
        while not is_it(self._now):
            try:
                self._now = json.loads(self._seen.get(timeout=max(0.0, give_up_s - time.monotonic())))
            except Empty:
                pytest.fail(f"Waited {timeout_s} s for {what}; the cluster is {json.dumps(self._now)}")
        return self._now

    def close(self) -> None:
        """Look no more."""
        self._process.kill()
        self._process.wait()


class Streams:
    """Streams that a client outside the cluster reads."""

    def __init__(self, client: Host) -> None:
        (client.files / "root/ask.py").write_bytes((HERE / "ask.py").read_bytes())
        self._process = client.start(f"exec python ask.py http://{HEAD}:8000 {API_KEY} {NUM_STREAMS} {MAX_TOKENS} 2>&1")
        self._said: Queue[str] = Queue()
        threading.Thread(target=_read_into, args=(self._process, self._said), daemon=True).start()

    def wait_until_begun(self) -> None:
        """All streams have begun and go on."""
        assert self._said.get(timeout=60) == "begun\n"

    def answers(self) -> list[dict[str, Any]]:
        """What the client has of each in the end."""
        line = self._said.get(timeout=100)
        if line == "begun\n":
            line = self._said.get(timeout=100)
        self._process.wait(timeout=10)
        answers: list[dict[str, Any]] = json.loads(line)
        return answers


def _read_into(process: subprocess.Popen[str], queue: Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if not line.startswith("\x1b"):  # Ray's own messages, in colours
            queue.put(line)


def _traces() -> tuple[list[str], str, list[str]]:
    named = Path("/run/netns")
    return (
        sorted(os.listdir("/sys/class/net")),
        Path("/proc/mounts").read_text(),
        sorted(os.listdir(named)) if named.exists() else [],
    )
