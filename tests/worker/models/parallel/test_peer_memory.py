"""Ranks map each other's memory all together or not at all."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from transom_kernels.all_reduce import PeerMemory, region_bytes
from transom_worker.models.parallel import peer_memory, process_group
from transom_worker.models.parallel.peer_memory import CudaRuntime, Handle, PeerAllReduce, map_peers
from transom_worker.models.parallel.process_group import listen

CPU, WAIT = torch.device("cpu"), timedelta(seconds=60)


def make_peers(size: int) -> PeerAllReduce:
    return PeerAllReduce(PeerMemory.of(0, [0] * size, CPU))


class FakeCuda:
    """CUDA's runtime of several ranks in one process: a handle is the address itself. Unless `is_able`, `open` fails."""

    def __init__(self, *, is_able: bool = True) -> None:
        self.regions: list[ctypes.Array[ctypes.c_byte]] = []
        self.is_able = is_able
        self.cudaGetErrorString = lambda error: {217: b"peer access is not supported"}[error]
        self.cudaGetErrorString.restype = None  # type: ignore[attr-defined]

    def cudaMalloc(self, address: Any, size: Any) -> int:
        self.regions.append((ctypes.c_byte * size.value)())
        address._obj.value = ctypes.addressof(self.regions[-1])
        return 0

    def cudaMemset(self, address: Any, value: int, size: Any) -> int:
        ctypes.memset(address, value, size.value)
        return 0

    def cudaDeviceSynchronize(self) -> int:
        return 0

    def cudaIpcGetMemHandle(self, handle: Any, address: Any) -> int:
        ctypes.memmove(handle, ctypes.byref(address), 8)
        return 0

    def cudaIpcOpenMemHandle(self, address: Any, handle: Handle, flags: Any) -> int:
        assert flags.value == 1
        address._obj.value = int.from_bytes(bytes(handle)[:8], "little")
        return 0 if self.is_able else 217


def mapped(hosts: list[str], monkeypatch: pytest.MonkeyPatch, *, unable: int | None = None) -> list[Any]:
    """What each of the ranks on these hosts gets, if rank `unable` cannot open the others' memory."""
    size, listener = len(hosts), listen("127.0.0.1")
    cuda = [FakeCuda(is_able=rank != unable) for rank in range(size)]
    of_thread = threading.local()
    monkeypatch.setattr(peer_memory, "loaded_runtime", lambda: CudaRuntime(of_thread.cuda))

    def one(rank: int) -> Any:
        of_thread.cuda = cuda[rank]
        store = process_group.c10d.TCPStore("127.0.0.1", listener.port, is_master=False, timeout=WAIT)
        return map_peers(store, rank=rank, size=size, host=hosts[rank], device=CPU)

    with ThreadPoolExecutor(size) as pool:
        made = list(pool.map(one, range(size)))
    for rank, peers in enumerate(made):
        if peers is not None:
            assert peers._memory.rank == rank
            assert peers._memory.regions.tolist() == [ctypes.addressof(each.regions[0]) for each in cuda]
            assert {len(each.regions[0]) for each in cuda} == {region_bytes(size)}
    return made


def test_ranks_of_one_host_map_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(mapped(["a", "a", "a"], monkeypatch))


def test_no_rank_uses_it_unless_all_can(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert mapped(["a", "b"], monkeypatch) == [None] * 2
    assert mapped(["a"] * 9, monkeypatch) == [None] * 9
    caplog.clear()
    assert mapped(["a"] * 3, monkeypatch, unable=1) == [None] * 3
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 3
    assert all(text.endswith("(rank 1: cudaIpcOpenMemHandle: peer access is not supported).") for text in warnings)


def test_the_sizes_that_are_summed_there() -> None:
    """Sums of a step have tokens x hidden size elements; larger ones go to nccl, sooner with more ranks."""
    tokens_by_ranks = {
        size: max(
            num for num in (1, 32, 64, 128) if make_peers(size).takes(torch.zeros(num, 4096, dtype=torch.bfloat16))
        )
        for size in (2, 4, 8)
    }
    assert tokens_by_ranks == {2: 64, 4: 64, 8: 32}
    assert not make_peers(2).takes(torch.zeros(8, dtype=torch.int64))


def test_a_process_without_cuda_says_so() -> None:
    with pytest.raises(RuntimeError, match="no libcudart"):
        peer_memory.loaded_runtime()
