"""Ranks that die, hang, leave or never come: the others get RankLost, and soon."""

from __future__ import annotations

import signal
import time
from multiprocessing.connection import Connection

import pytest
import torch
from rank_processes import KINDS, ranks

from transom_worker.errors import RankLost
from transom_worker.parallel.communicator import Communicator

SOON_S = 1.0  # on a machine whose cores are all taken; else it is some milliseconds
TIMEOUT_S = 0.5


def add_up_until_lost(comm: Communicator, rank: int, pipe: Connection) -> tuple[float, str, bool]:
    """When and how it ended, and whether it ends the same when it is tried again."""
    x = torch.ones(576)
    try:
        for step in range(10**9):
            comm.all_reduce_(x.fill_(1.0))
            if step == 100:
                pipe.send("going")
    except RankLost as error:
        ended = time.monotonic()
        comm.close()
        with pytest.raises(RankLost):
            comm.all_reduce_(x)
        return ended, str(error), True
    raise AssertionError


def wait_for_the_last(comm: Communicator, rank: int, pipe: Connection) -> float:
    """The last rank never adds anything."""
    comm.all_reduce_(torch.ones(3))
    pipe.send("going")
    if rank == 2:
        pipe.recv()
    with pytest.raises(RankLost):
        comm.all_reduce_(torch.ones(3))
    return time.monotonic()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_while_adding_up(kind: str, size: int) -> None:
    with ranks(kind, size, add_up_until_lost) as processes:
        assert [process.receive() for process in processes] == ["going"] * size
        processes[-1].signal(signal.SIGKILL)
        killed = time.monotonic()
        for process in processes[:-1]:
            ended, message, again = process.receive()
            assert ended - killed < SOON_S
            assert again
            assert "ank" in message


@pytest.mark.parametrize("kind", KINDS)
def test_killed_while_others_wait_for_it(kind: str) -> None:
    with ranks(kind, 3, wait_for_the_last) as processes:
        assert [process.receive() for process in processes] == ["going"] * 3
        processes[2].signal(signal.SIGKILL)
        killed = time.monotonic()
        assert all(process.receive() - killed < SOON_S for process in processes[:2])


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_while_adding_up(kind: str) -> None:
    with ranks(kind, 2, add_up_until_lost, timeout_s=TIMEOUT_S) as (first, second):
        assert [first.receive(), second.receive()] == ["going"] * 2
        second.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        ended, message, again = first.receive()
        assert TIMEOUT_S * 0.9 < ended - stopped < TIMEOUT_S + SOON_S
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
def test_a_rank_that_leaves_is_not_waited_for(kind: str) -> None:
    with ranks(kind, 2, leave_or_wait) as (first, _):
        assert "ank" in first.receive()


def idle(comm: Communicator, rank: int, pipe: Connection) -> float:
    """CPU time of half a second of waiting."""
    comm.all_reduce_(torch.ones(3))
    if rank == 1:
        pipe.recv()
    start = time.process_time()
    comm.all_reduce_(torch.ones(3))
    return time.process_time() - start


@pytest.mark.parametrize("kind", KINDS)
def test_waiting_leaves_the_core_to_others(kind: str) -> None:
    with ranks(kind, 2, idle) as (first, second):
        time.sleep(0.5)
        second.send("go on")
        assert first.receive() < 0.15


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_never_comes(kind: str) -> None:
    with ranks(kind, 3, idle, timeout_s=TIMEOUT_S, come=2) as processes:
        for process in processes:
            error = process.receive()
            assert isinstance(error, RankLost)
            assert f"{TIMEOUT_S:g} s" in str(error)
