"""Sums, gathers and broadcasts of both communicators, between processes.

Ranks that die, hang, close or never connect: the other ranks raise RankLost before their timeout. And the rendezvous, which uses
shared memory where ranks can share it, TCP elsewhere, and leaves no file.
"""

import hashlib
import itertools
import os
import platform
import signal
import time
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.matrices import matrix, some_daily
from tests.worker.models.parallel.rank_processes import KINDS, outcomes, ranks
from transom_core.errors import RankLost
from transom_worker.models.parallel.communicator import Communicator
from transom_worker.models.parallel.process_group import ProcessGroup
from transom_worker.models.parallel.rank_memory import BUFFER_BYTES
from transom_worker.models.parallel.rendezvous import Rendezvous, connect, host_id
from transom_worker.models.parallel.shared_memory import SMALL_BYTES

TIMEOUT_S = 0.5
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
SHAPES = ((), (0,), (1,), (576,), (3, 5, 7), (64, 576), (SMALL_BYTES // 2 + 7,), (BUFFER_BYTES // 4 + 1,))
SIZES = (2, 3)


def add_up_until_lost(
    comm: Communicator, rank: int, pipe: Connection, timeout_s: float | None = None
) -> tuple[float, str]:
    """Return how long the rank waited and how that ended; another try ends the same.

    `timeout_s` is the rank's timeout from the time on when all ranks are connected.
    """
    x, begun_s = torch.ones(576), 0.0
    try:
        for step in range(10**9):
            begun_s = time.monotonic()
            comm.all_reduce_(x.fill_(1.0))
            if step == 100:
                if timeout_s is not None:
                    comm._timeout_s = timeout_s  # type: ignore[attr-defined]
                    if isinstance(comm, ProcessGroup):
                        comm._group._set_default_timeout(timedelta(seconds=timeout_s))
                pipe.send("going")
    except RankLost as error:
        waited_s = time.monotonic() - begun_s
        comm.close()
        with pytest.raises(RankLost):
            comm.all_reduce_(x)
        return waited_s, str(error)
    raise AssertionError


@pytest.mark.parametrize(("kind", "size"), matrix(KINDS, [2, 3], strength=1))
def test_killed_during_all_reduce(kind: str, size: int) -> None:
    with ranks(kind, size, add_up_until_lost) as processes:
        assert [process.receive() for process in processes] == ["going"] * size
        processes[-1].signal(signal.SIGKILL)
        for process in processes[:-1]:
            _, message = process.receive()
            assert "ank" in message


@pytest.mark.parametrize("kind", KINDS)
def test_stopped_during_all_reduce(kind: str) -> None:
    with ranks(kind, 2, partial(add_up_until_lost, timeout_s=TIMEOUT_S)) as (first, second):
        assert [first.receive(), second.receive()] == ["going"] * 2
        second.signal(signal.SIGSTOP)
        waited_s, message = first.receive()
        assert waited_s > TIMEOUT_S * 0.9
        assert f"{TIMEOUT_S:g} s" in message


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
        assert "transom-ranks (deleted)" in Path(f"/proc/{processes[0].receive()}/maps").read_text()
        for process in processes:
            process.signal(signal.SIGKILL)
    assert files() == before
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if "transom-ranks" in os.path.realpath(fd)]


def tensor(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank * 1000 + sum(shape))
    if dtype == torch.int64:
        return torch.randint(-(2**61), 2**61, shape, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)


def in_order(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    total = tensor(0, shape, dtype)
    for rank in range(1, size):
        total = total + tensor(rank, shape, dtype)
    return total


def sums(comm: Communicator, rank: int, pipe: Connection) -> dict[Any, tuple[str, torch.Tensor]]:
    """Each sum's digest and its first elements."""
    found = {}
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        total = comm.all_reduce_(tensor(rank, shape, dtype))
        assert total.shape == shape
        found[shape, dtype] = digest(total), total.flatten()[:5000].clone()
    return found


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("kind", "size"), some_daily(itertools.product(KINDS, SIZES), daily=[("memory", 3), ("gloo", 2)])
)
def test_sums_are_the_same_bits_on_every_rank(kind: str, size: int) -> None:
    first, *others = outcomes(kind, size, sums)
    for (shape, dtype), (bits, beginning) in first.items():
        assert all(other[shape, dtype][0] == bits for other in others)
        expected = in_order(size, shape, dtype)
        torch.testing.assert_close(beginning, expected.flatten()[:5000], rtol=0.02, atol=0.05)
        if kind == "memory" or dtype == torch.int64:
            assert bits == digest(expected)


def strided(comm: Communicator, rank: int, pipe: Connection) -> list[torch.Tensor]:
    whole = tensor(rank, (6, 8), torch.float32)
    before = whole.clone()
    comm.all_reduce_(whole[:, 1::3])
    assert torch.equal(whole[:, 0::3], before[:, 0::3])
    passed_on = tensor(rank, (6, 8), torch.float32)
    comm.broadcast_(passed_on.T)
    gathered = comm.gather(tensor(rank, (4, 6), torch.float32).T)
    return [whole[:, 1::3].clone(), passed_on, *(gathered or [])]


@pytest.mark.parametrize("kind", KINDS)
def test_strided_tensors(kind: str) -> None:
    first, second = outcomes(kind, 2, strided)
    expected = in_order(2, (6, 8), torch.float32)[:, 1::3]
    assert torch.equal(first[0], expected)
    assert torch.equal(second[0], expected)
    assert torch.equal(second[1], tensor(0, (6, 8), torch.float32))
    assert all(torch.equal(part, tensor(rank, (4, 6), torch.float32).T) for rank, part in enumerate(first[2:]))


def mixture(comm: Communicator, rank: int, pipe: Connection) -> bool:
    """Hundreds of operations of random kinds and sizes, ranks in and out of step; each rank knows what must come out."""
    choices = torch.Generator().manual_seed(5)
    dawdling = torch.Generator().manual_seed(rank)
    for step in range(300):
        what, width = torch.randint(0, 4, (2,), generator=choices).tolist()
        length = int(torch.randint(1, 3000, (1,), generator=choices)) if step % 25 else BUFFER_BYTES // 4 + step
        values = [torch.arange(length) + float(step * 3 + peer) for peer in range(3)]
        if torch.rand((), generator=dawdling) < 0.1:
            torch.randn(20_000)
        if what <= 1:
            assert torch.equal(comm.all_reduce_(values[rank].clone()), sum(values, start=torch.zeros(length)))
        elif what == 2:
            assert torch.equal(comm.broadcast_(values[rank].clone()), values[0])
        else:
            rows = values[rank][: length - width * rank] if length > 10 else values[rank]
            parts = comm.gather(rows.expand(2, -1))  # of widths that may differ
            assert (parts is None) == (rank != 0)
            for peer, part in enumerate(parts or []):
                assert part.equal(values[peer][: length - width * peer if length > 10 else length].expand(2, -1))
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_out_of_step(kind: str) -> None:
    assert outcomes(kind, 3, mixture) == [True] * 3


def many_shapes(comm: Communicator, rank: int, pipe: Connection) -> bool:
    for length in range(1, 700):  # more than views are kept
        assert torch.equal(comm.all_reduce_(torch.full((length,), rank + 1.0)), torch.full((length,), 3.0))
    with torch.inference_mode():
        inside = comm.all_reduce_(torch.full((3,), rank + 1.0))
        comm.all_reduce_(torch.ones(4321))
    return bool((comm.all_reduce_(torch.ones(4321)) == 2.0).all() and (inside == 3.0).all())


def test_many_shapes_in_and_out_of_inference_mode() -> None:
    assert outcomes("memory", 2, many_shapes) == [True, True]
