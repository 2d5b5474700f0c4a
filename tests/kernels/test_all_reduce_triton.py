"""One-shot all-reduce by processes that are ranks: sums in order of rank, the same bits on each, over many calls of any size."""

import mmap
import os
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from tests.worker.models.parallel.rank_processes import ranks
from transom_kernels.all_reduce.gpu import (
    BLOCK_BYTES,
    CAPACITY_BYTES,
    DTYPES,
    PeerMemory,
    fits,
    one_shot_all_reduce_,
    region_bytes,
)
from transom_kernels.launch import INTERPRETED
from transom_worker.models.parallel.communicator import Communicator

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="ranks are processes on a CPU")
SIZES = (8, BLOCK_BYTES // 4, BLOCK_BYTES // 4 + 8, 3 * BLOCK_BYTES // 4 + 24, 16)


def peer_memory(path: str, rank: int, size: int) -> tuple[PeerMemory, list[torch.Tensor]]:
    """The regions in a file; each process maps it to other addresses."""
    with open(path, "r+b") as file:
        mapped = torch.from_numpy(np.frombuffer(mmap.mmap(file.fileno(), size * region_bytes(size)), dtype=np.uint8))
    regions = list(mapped.chunk(size))
    return PeerMemory.of(rank, [region.data_ptr() for region in regions], torch.device("cpu")), regions


def inputs(rank: int) -> list[torch.Tensor]:
    """Sums of whole numbers are exact in every dtype, and sums of others show the order."""
    made = torch.Generator().manual_seed(rank)
    whole = [torch.randint(-8, 8, (num,), generator=made).to(dtype) for dtype in DTYPES for num in SIZES]
    return whole + [torch.randn(num, generator=made) for num in SIZES]


def add_all(comm: Communicator, rank: int, pipe: Connection) -> Any:
    path, size = pipe.recv()
    memory, _ = peer_memory(path, rank, size)
    summed = [one_shot_all_reduce_(x, memory) for x in inputs(rank)]
    comm.all_reduce_(torch.zeros(1))  # no rank ends while others read its memory
    return summed, memory.calls


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_all_ranks_get_the_sum_in_order_of_rank(size: int, tmp_path: Any) -> None:
    path = tmp_path / "regions"
    path.write_bytes(bytes(size * region_bytes(size)))
    wanted = inputs(0)
    for rank in range(1, size):
        wanted = [x + y for x, y in zip(wanted, inputs(rank), strict=True)]
    with ranks("memory", size, add_all) as processes:
        for process in processes:
            process.send((str(path), size))
        results = [process.receive() for process in processes]
    for summed, calls in results:
        assert all(got.equal(want) for got, want in zip(summed, wanted, strict=True))
        assert (calls[0], calls[4]) == (len(wanted), 0)  # the largest tensor has four blocks


def wait_in_vain(comm: Communicator, rank: int, pipe: Connection) -> Any:
    memory, regions = peer_memory(pipe.recv(), rank, 2)
    memory.aborted = regions[1][:4].view(torch.int32)  # where the test can set it
    one_shot_all_reduce_(torch.ones(8), memory)  # rank 1 never comes
    return "ended"


def test_a_launch_that_waits_can_be_aborted(tmp_path: Any) -> None:
    path = tmp_path / "regions"
    path.write_bytes(bytes(2 * region_bytes(2)))
    _, regions = peer_memory(str(path), 1, 2)
    signal = regions[1][2 * CAPACITY_BYTES :][:4].view(torch.int32)  # rank 0's signal to rank 1
    with ranks("memory", 1, wait_in_vain) as processes:
        processes[0].send(str(path))
        while not signal.item():  # the launch has not come to the point where it waits
            os.sched_yield()
        regions[1][:4].view(torch.int32).fill_(1)
        assert processes[0].receive() == "ended"


def test_tensors_that_fit() -> None:
    assert fits(torch.zeros(CAPACITY_BYTES // 4))
    assert fits(torch.zeros(2, 8, dtype=torch.bfloat16))
    doubles, odd, turned = torch.zeros(8, dtype=torch.float64), torch.zeros(7), torch.zeros(4, 4).T
    assert not any(fits(other) for other in (torch.zeros(CAPACITY_BYTES // 4 + 1), doubles, odd, turned))
