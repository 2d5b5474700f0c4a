"""Ranks that die, hang, close or never connect: the other ranks raise RankLost before their timeout. And the rendezvous, which uses
shared memory where ranks can share it, TCP elsewhere, and leaves no file.
"""

import os
import platform
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from tests.matrices import matrix
from tests.worker.models.parallel.rank_processes import KINDS, ranks
from transom_core.errors import RankLost
from transom_worker.models.parallel.communicator import Communicator
from transom_worker.models.parallel.process_group import ProcessGroup
from transom_worker.models.parallel.rendezvous import Rendezvous, connect, host_id

TIMEOUT_S = 0.5


def add_up_until_lost(comm: Communicator, rank: int, pipe: Connection) -> tuple[float, str, bool]:
    """How long it waited and how it ended, and whether it ends the same when it is tried again."""
    return _add_up(comm, pipe, lambda: None)


def add_up_until_late(comm: Communicator, rank: int, pipe: Connection) -> tuple[float, str, bool]:
    """As above, with a rank whose timeout becomes short once both ranks are connected."""
    return _add_up(comm, pipe, lambda: _be_impatient(comm))


def _add_up(comm: Communicator, pipe: Connection, when_going: Callable[[], None]) -> tuple[float, str, bool]:
    x, begun_s = torch.ones(576), 0.0
    try:
        for step in range(10**9):
            begun_s = time.monotonic()
            comm.all_reduce_(x.fill_(1.0))
            if step == 100:
                when_going()
                pipe.send("going")
    except RankLost as error:
        waited_s = time.monotonic() - begun_s
        comm.close()
        with pytest.raises(RankLost):
            comm.all_reduce_(x)
        return waited_s, str(error), True
    raise AssertionError


def _be_impatient(comm: Communicator) -> None:
    comm._timeout_s = TIMEOUT_S  # type: ignore[attr-defined]
    if isinstance(comm, ProcessGroup):
        comm._group._set_default_timeout(timedelta(seconds=TIMEOUT_S))


@pytest.mark.parametrize(("kind", "size"), matrix(KINDS, [2, 3], strength=1))
def test_killed_during_all_reduce(kind: str, size: int) -> None:
    with ranks(kind, size, add_up_until_lost) as processes:
        assert [process.receive() for process in processes] == ["going"] * size
        processes[-1].signal(signal.SIGKILL)
        for process in processes[:-1]:
            _, message, again = process.receive()
            assert again
            assert "ank" in message


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_during_all_reduce(kind: str) -> None:
    with ranks(kind, 2, add_up_until_late) as (first, second):
        assert [first.receive(), second.receive()] == ["going"] * 2
        second.signal(signal.SIGSTOP)
        waited_s, message, again = first.receive()
        assert waited_s > TIMEOUT_S * 0.9
        assert f"{TIMEOUT_S:g} s" in message
        assert again


def leave_or_wait(comm: Communicator, rank: int, pipe: Connection) -> str:
    comm.all_reduce_(torch.ones(3))
    if rank == 1:
        comm.close()
        pipe.recv()
    with pytest.raises(RankLost) as error:
        comm.all_reduce_(torch.ones(3))
    return str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_closes_is_not_waited_for(kind: str) -> None:
    with ranks(kind, 2, leave_or_wait) as (first, _):
        assert "ank" in first.receive()


def idle(comm: Communicator, rank: int, pipe: Connection) -> tuple[float, float]:
    """CPU time of half a second of waiting, or more, and how long it was."""
    comm.all_reduce_(torch.ones(3))
    if rank == 1:
        pipe.recv()
    start, begun_s = time.process_time(), time.monotonic()
    comm.all_reduce_(torch.ones(3))
    return time.process_time() - start, time.monotonic() - begun_s


@pytest.mark.parametrize("kind", KINDS)
def test_waiting_leaves_the_core_to_others(kind: str) -> None:
    with ranks(kind, 2, idle) as (first, second):
        time.sleep(0.5)
        second.send("go on")
        busy_s, waited_s = first.receive()
        assert busy_s < 0.15 + 0.1 * waited_s


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_never_connects(kind: str) -> None:
    with ranks(kind, 3, idle, timeout_s=TIMEOUT_S, come=2) as processes:
        for process in processes:
            error = process.receive()
            assert isinstance(error, RankLost)
            assert f"{TIMEOUT_S:g} s" in str(error)


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
