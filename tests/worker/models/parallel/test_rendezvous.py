"""A rendezvous uses shared memory where ranks can share it, TCP elsewhere, and leaves no file."""

from __future__ import annotations

import os
import platform
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tests.worker.models.parallel.rank_processes import ranks
from transom_core.errors import RankLost
from transom_worker.models.parallel.communicator import Communicator
from transom_worker.models.parallel.rendezvous import Rendezvous, connect, host_id


def kind_of(hosts: list[str], device: str = "cpu") -> str:
    rendezvous = Rendezvous(hosts, device=device)
    rendezvous.close()
    return rendezvous.address.partition(":")[0]


def test_other_hosts_other_devices_and_other_machines_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind_of([host_id()] * 3) == "memory"
    assert kind_of([host_id(), "elsewhere"]) == "tcp"
    assert kind_of(["elsewhere"] * 2) == "tcp"
    assert kind_of([host_id()] * 2, device="cuda") == "tcp"
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert kind_of([host_id()] * 2) == "tcp"


def test_an_address_of_another_host_cannot_be_listened_on() -> None:
    with pytest.raises(RankLost, match=r"cannot rendezvous at 192\.0\.2\.1"):
        Rendezvous(["a", "b"], ip="192.0.2.1")


@pytest.mark.parametrize("hosts", [[host_id()] * 2, ["a", "b"]])
def test_no_rank_connects_to_a_closed_rendezvous(hosts: list[str]) -> None:
    rendezvous = Rendezvous(hosts)
    rendezvous.close()
    rendezvous.close()
    with pytest.raises(RankLost):
        connect(rendezvous.address, rank=0, size=2, timeout_s=0.3)


def test_shared_memory_is_made_for_one_number_of_ranks() -> None:
    rendezvous = Rendezvous([host_id()] * 2)
    with pytest.raises(RankLost, match="not made for 5 ranks"):
        connect(rendezvous.address, rank=0, size=5, timeout_s=0.3)
    rendezvous.close()


def add_up(comm: Communicator, rank: int, pipe: Connection) -> None:
    comm.all_reduce_(torch.ones(5))
    pipe.send(os.getpid())
    pipe.recv()


def test_killed_ranks_leave_no_memory_behind() -> None:
    def files() -> set[str]:
        return {path.name for path in Path("/dev/shm").iterdir() if "transom" in path.name}

    before = files()
    with ranks("memory", 2, add_up) as processes:
        pid = processes[0].receive()
        assert "transom-ranks (deleted)" in Path(f"/proc/{pid}/maps").read_text()
        for process in processes:
            process.signal(signal.SIGKILL)
    assert files() == before
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if "transom-ranks" in os.path.realpath(fd)]
